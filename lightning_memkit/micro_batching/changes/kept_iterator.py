"""Snapshot of an iterator that a step may advance; after a restore it yields the same items again."""

import weakref
from collections import deque
from collections.abc import Iterator
from io import IOBase
from typing import Any

from typing_extensions import override

from lightning_memkit.micro_batching.changes.kept_state import Kept
from lightning_memkit.micro_batching.changes.kept_tensor import Place
from lightning_memkit.micro_batching.changes.step_changes import StepChange


def is_iterator(value: Any) -> bool:
    """Whether a value is an iterator to be made rewindable: Python's own, a generator, or a loader's."""
    if isinstance(value, Rewindable):
        return True
    kind = type(value)
    known = kind.__module__ in ("builtins", "itertools") or kind.__module__.startswith("torch.utils.data")
    return known and isinstance(value, Iterator) and not isinstance(value, IOBase)


class Rewindable:
    """Wraps an iterator so that it can go back; keeps the items since the earliest snapshot still alive.

    Args:
        source: the iterator; each of its items is drawn once.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self.position = 0
        self._drawn: deque[Any] = deque()  # the last items before the position
        self._again: deque[Any] = deque()  # items to yield again after going back
        self._places: weakref.WeakSet[KeptIterator] = weakref.WeakSet()

    def __iter__(self) -> "Rewindable":
        return self

    def __next__(self) -> Any:
        item = self._again.popleft() if self._again else next(self.source)
        self.position += 1
        if self._places:
            self._drawn.append(item)
        return item

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_drawn": deque(), "_places": weakref.WeakSet()}

    def ask_for(self, place: "KeptIterator") -> None:
        """Keep the items that are drawn from now on, as long as the snapshot `place` is alive."""
        first = min((one.position for one in self._places), default=self.position)
        while len(self._drawn) > self.position - first:
            self._drawn.popleft()
        self._places.add(place)

    def back_to(self, position: int) -> None:
        """Go back: items drawn since `position` are yielded again."""
        while self.position > position and self._drawn:
            self._again.appendleft(self._drawn.pop())
            self.position -= 1


class KeptIterator(Kept):
    """Snapshot of the position of an iterator in an attribute, which is replaced by a `Rewindable`.

    Args:
        place: where it is.
        owner: the attributes that hold it.
        name: its name among them.
    """

    def __init__(self, place: Place, owner: dict[str, Any], name: str) -> None:
        if not isinstance(owner[name], Rewindable):
            owner[name] = Rewindable(owner[name])
        self.place, self._iterator = place, owner[name]
        self.position = self._iterator.position
        self._iterator.ask_for(self)

    @override
    def changes(self) -> Iterator[StepChange]:
        if self._iterator.position != self.position:
            yield self.place.change()

    @override
    def now(self, change: StepChange) -> Any:
        return self._iterator.position

    @override
    def before(self, now: Any) -> Any:
        return None

    @override
    def restore(self) -> None:
        self._iterator.back_to(self.position)

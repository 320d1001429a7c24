"""Snapshot of an optimizer's states by reference: tells in every step, without copies, what was changed in them."""

from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_memkit.micro_batching.changes.alike import alike
from lightning_memkit.micro_batching.changes.kept_state import Kept, set_items
from lightning_memkit.micro_batching.changes.kept_tensor import KeptTensor, Place
from lightning_memkit.micro_batching.changes.step_changes import ABSENT, ChangeKind, StepChange, label

_DEEPEST = 4
_Path = tuple[Any, ...]  # a parameter, and the keys below it


class KeptStates(Kept):
    """Snapshot of which states an optimizer has for its parameters, and of their tensors' version counters.

    States are large and each step of the optimizer changes them all: they are not copied. What they hold is restored,
    the values of tensors are not; `written` names those.

    Args:
        place: where the states are.
        owner: the optimizer's `state`.
        known: snapshots of the module's tensors, by which parameters are named.
    """

    def __init__(self, place: Place, owner: dict[Any, Any], known: Sequence[KeptTensor]) -> None:
        self.place, self._known = place, known
        self._names: dict[int, str] | None = None
        self._contents: list[tuple[_Path, Any, Any]] = []
        # Lists side by side, because there may be thousands of tensors in every step.
        self._paths: list[_Path] = []
        self._tensors: list[Tensor] = []
        self._take((), owner)
        self._versions = _versions(self._tensors)

    def _take(self, path: _Path, container: Any) -> None:
        if not isinstance(container, tuple):
            self._contents.append((path, container, container.copy()))
        for key, item in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(item, Tensor):
                if not item.is_inference():  # such a tensor has no version counter
                    self._paths.append((*path, key))
                    self._tensors.append(item)
            elif isinstance(item, (dict, list, tuple)) and len(path) < _DEEPEST:
                self._take((*path, key), item)

    def take_tensors(self, names: frozenset[str] | None) -> list[tuple[Place, Tensor]]:
        """The tensors of these names, or all; their values are another snapshot's from here on."""
        places = [self.place.below(self._suffix(path)) for path in self._paths]
        found = list(zip(places, self._tensors, self._paths, strict=True))
        left = [] if names is None else [one for one in found if one[0].name not in names]
        self._paths, self._tensors = [path for *_, path in left], [tensor for _, tensor, _ in left]
        self._versions = _versions(self._tensors)
        return [(place, one) for place, one, _ in found if names is None or place.name in names]

    def written(self) -> frozenset[tuple[str, str]]:
        """The keys of the tensors that were written to."""
        return frozenset(self.place.below(self._suffix(path)).key for path in self._written())

    def _written(self) -> list[_Path]:
        now = _versions(self._tensors)
        if now == self._versions:
            return []
        return [path for path, a, b in zip(self._paths, self._versions, now, strict=True) if a != b]

    def optimizer_steps(self) -> None:
        """What changes from here on is the optimizer's: its journal undoes that, and states may be freed."""
        self._paths, self._tensors, self._versions = [], [], []
        self._contents = [one for one in self._contents if list(_differing(*one[1:]))]

    @property
    @override
    def is_still(self) -> bool:
        for _, now, before in self._contents:
            values = (now.values(), before.values()) if isinstance(before, dict) else (now, before)
            if len(now) != len(before) or not all(map(is_, *values)):
                return False
        return _versions(self._tensors) == self._versions

    @override
    def moved(self) -> Iterator[StepChange]:
        for path, now, before in self._contents:
            for key in _differing(now, before):
                yield self._change((*path, *key), self._kind(now, before, key))
        yield from map(self._change, self._written())

    @override
    def changes(self) -> Iterator[StepChange]:
        for path, now, before in self._contents:
            for key in _differing(now, before):
                if not (key and alike(_at(before, key), _at(now, key))):
                    yield self._change((*path, *key), self._kind(now, before, key))
        yield from map(self._change, self._written())

    @override
    def now(self, change: StepChange) -> Any:
        values: dict[str, Any] = {}
        for path, now, before in self._contents:
            for key in _differing(now, before):
                if self._change((*path, *key), self._kind(now, before, key)) == change:
                    values[change.name] = _at(now, key)
        return values

    @override
    def before(self, now: Any) -> Any:
        return None

    @override
    def restore(self) -> None:
        for _, now, before in self._contents:
            if isinstance(now, dict):
                set_items(now, before)
            elif len(now) != len(before) or not all(map(is_, now, before)):
                now[:] = before
        self._versions = _versions(self._tensors)

    def _change(self, path: _Path, kind: ChangeKind = "optimizer_state") -> StepChange:
        return self.place.of_kind(kind).below(self._suffix(path)).change()

    @staticmethod
    def _kind(now: Any, before: Any, key: _Path) -> ChangeKind:
        """What is set up or removed may be so only once; a state that has another value is changed again."""
        is_new = key and (_at(now, key) is ABSENT or _at(before, key) is ABSENT)
        return "object" if is_new else "optimizer_state"

    def _suffix(self, path: _Path) -> str:
        return "".join(f"[{self._named(key)}]" for key in path)

    def _named(self, key: Any) -> str:
        if not isinstance(key, Tensor):
            return repr(key) if isinstance(key, (str, int, tuple)) else type(key).__name__
        if self._names is None:
            self._names = {id(one.tensor): label(*one.place.key) for one in self._known}
        return self._names.get(id(key), type(key).__name__)


def _differing(now: Any, before: Any) -> Iterator[_Path]:
    """The keys of a dictionary whose items are others; an empty path for a list with other items."""
    if isinstance(now, dict):
        for key in {**before, **now}:
            if now.get(key, ABSENT) is not before.get(key, ABSENT):
                yield (key,)
    elif len(now) != len(before) or not all(map(is_, now, before)):
        yield ()


def _at(container: Any, key: _Path) -> Any:
    return container.get(key[0], ABSENT) if key else container


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]

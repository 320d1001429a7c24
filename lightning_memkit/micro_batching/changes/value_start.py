"""A value at the start of a batch: whether a micro-batch has changed it, what it has left, and back to the start."""

from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.micro_batching.changes.own_objects import MOST_ITEMS

_COPIED = (
    4096  # elements of a tensor that a step may write to in place: larger ones are not copied in every batch
)
_PLAIN = (bool, int, float, str)

Set = Callable[[Any], None]


class Anew(list[Any]):
    """The whole contents of a list that no longer begins with the items that it had at the start."""


class ValueStart:
    """A value that a step replaces: a number, a text, or `ABSENT`.

    Args:
        value: the value.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def left(self, value: Any) -> Any:
        """What a micro-batch has left, to be joined with what others have."""
        return value

    def moved(self, value: Any) -> bool:
        """Whether it is another value than at the start."""
        start = self.value
        plain = type(value) is type(start) and isinstance(value, _PLAIN)
        return value is not start and not (plain and value == start)

    def reset(self, value: Any, put: Set) -> None:
        """Restore the start's value, in the place of the current one."""
        if value is not self.value:
            put(self.value)


class TensorStart(ValueStart):
    """A tensor that a step replaces or writes to in place."""

    def __init__(self, value: Tensor) -> None:
        super().__init__(value)
        self._version = value._version
        self._copy = value.detach().clone() if value.numel() <= _COPIED else None

    def moved(self, value: Any) -> bool:
        """Whether it is another tensor, or was written to."""
        return value is not self.value or value._version != self._version

    def reset(self, value: Any, put: Set) -> None:
        """Restore the start's tensor, with its values if it is small."""
        if self.value._version != self._version and self._copy is not None:
            with torch.no_grad():
                self.value.copy_(self._copy)
            self._version = self.value._version
        super().reset(value, put)


class ListStart(ValueStart):
    """A list with its items, by reference; of one with more than 10,000, its length and last item only."""

    def __init__(self, value: list[Any]) -> None:
        super().__init__(value)
        self._length = len(value)
        self._items = list(value) if len(value) <= MOST_ITEMS else None
        self._last = value[-1] if value else None

    def left(self, value: Any) -> Any:
        """The items that a list has beyond those of the start, or all of its items as `Anew`."""
        if not isinstance(value, list):
            return value
        return value[self._length :] if self._begins(value) else Anew(value)

    def moved(self, value: Any) -> bool:
        """Whether it is another list, or has other items."""
        return value is not self.value or len(value) != self._length or not self._begins(value)

    def reset(self, value: Any, put: Set) -> None:
        """Give the list the items that it had, and restore it."""
        owner = self.value
        if self._items is None:
            del owner[self._length :]
        elif len(owner) != self._length or not self._begins(owner):
            list.__setitem__(owner, slice(None), self._items)
        super().reset(value, put)

    def fill(self, value: list[Any], left: list[Any]) -> None:
        """Let a list hold what `left` says: these items after those of the start, or these only."""
        value[0 if isinstance(left, Anew) else self._length :] = left

    def _begins(self, value: list[Any]) -> bool:
        if len(value) < self._length:
            return False
        if self._items is None:
            return value[self._length - 1] is self._last
        return all(map(is_, value, self._items))


def start_of(value: Any) -> ValueStart:
    """What is kept of a value before a batch."""
    if isinstance(value, list):
        return ListStart(value)
    if isinstance(value, Tensor) and not value.is_inference():
        return TensorStart(value)
    return ValueStart(value)

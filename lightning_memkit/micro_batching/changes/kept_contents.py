"""Snapshots by copy of bytes, closure cells, NumPy arrays and random generators; of long containers by length."""

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
from typing_extensions import override

from lightning_memkit.micro_batching.changes.alike import alike
from lightning_memkit.micro_batching.changes.kept_state import Kept
from lightning_memkit.micro_batching.changes.kept_tensor import Place
from lightning_memkit.micro_batching.changes.step_changes import StepChange
from lightning_memkit.utilities import generators

BYTES = (bytearray, array)
_ABSENT = object()


class KeptBytes(Kept):
    """Snapshot of a `bytearray` or an `array.array`."""

    def __init__(self, place: Place, owner: Any) -> None:
        self.place, self._owner, self._copy = place, owner, owner[:]

    @override
    def changes(self) -> Iterator[StepChange]:
        if bytes(self._copy) != bytes(self._owner):
            yield self.place.change()

    @override
    def now(self, change: StepChange) -> Any:
        return self._owner[:]

    @override
    def before(self, now: Any) -> Any:
        return self._copy

    @override
    def restore(self) -> None:
        if bytes(self._copy) != bytes(self._owner):
            self._owner[:] = self._copy


class KeptCell(Kept):
    """Snapshot of a closure cell, a variable that functions share (`nonlocal n; n += 1`)."""

    def __init__(self, place: Place, owner: Any) -> None:
        self.place, self._owner, self.content = place, owner, _content(owner)

    @override
    def moved(self) -> Iterator[StepChange]:
        if _content(self._owner) is not self.content:
            yield self.place.change()

    @override
    def changes(self) -> Iterator[StepChange]:
        if not alike(self.content, _content(self._owner)):
            yield self.place.change()

    @override
    def now(self, change: StepChange) -> Any:
        return _content(self._owner)

    @override
    def before(self, now: Any) -> Any:
        return self.content

    @override
    def restore(self) -> None:
        if self.content is not _ABSENT and _content(self._owner) is not self.content:
            self._owner.cell_contents = self.content


class KeptArray(Kept):
    """Snapshot of a NumPy array's values."""

    def __init__(self, place: Place, owner: np.ndarray) -> None:
        self.place, self._owner, self._copy = place, owner, owner.copy()

    @override
    def changes(self) -> Iterator[StepChange]:
        if not alike(self._copy, self._owner):
            yield self.place.change()

    @override
    def now(self, change: StepChange) -> Any:
        return self._owner

    @override
    def before(self, now: Any) -> Any:
        return self._copy

    @override
    def restore(self) -> None:
        if not alike(self._copy, self._owner):
            self._owner[...] = self._copy


class KeptLength(Kept):
    """Snapshot of the length of a container too long to be copied in every step.

    Items that a list gains are removed. Other changes can't be undone: `is_lost` tells.
    """

    def __init__(self, place: Place, owner: Any) -> None:
        self.place, self._owner, self._length = place, owner, len(owner)

    @property
    def is_lost(self) -> bool:
        """Whether the container changed in a way that `restore` can't undo."""
        now = len(self._owner)
        return now < self._length or (now > self._length and not isinstance(self._owner, list))

    @override
    def changes(self) -> Iterator[StepChange]:
        if len(self._owner) != self._length:
            yield self.place.change()

    @override
    def now(self, change: StepChange) -> Any:
        return list(self._owner)[self._length :]

    @override
    def before(self, now: Any) -> Any:
        return None

    @override
    def restore(self) -> None:
        if isinstance(self._owner, list):
            del self._owner[self._length :]


class KeptGenerator(Kept):
    """Snapshot of the state of a random generator that the module owns."""

    def __init__(self, place: Place, owner: Any) -> None:
        self.place, self._owner, self._state = place, owner, generators.state_of(owner)

    @override
    def changes(self) -> Iterator[StepChange]:
        if not alike(self._state, generators.state_of(self._owner)):
            yield self.place.change()

    @override
    def now(self, change: StepChange) -> Any:
        return generators.state_of(self._owner)

    @override
    def before(self, now: Any) -> Any:
        return None

    @override
    def restore(self) -> None:
        generators.set_state(self._owner, self._state)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return _ABSENT

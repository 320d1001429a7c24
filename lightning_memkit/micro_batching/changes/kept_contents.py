"""Snapshots by copy of bytes, closure cells, NumPy arrays and random generators; of long containers by length."""

import zlib
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
from typing_extensions import override

from lightning_memkit.micro_batching.changes.alike import alike
from lightning_memkit.micro_batching.changes.kept_state import Kept
from lightning_memkit.micro_batching.changes.kept_tensor import Place
from lightning_memkit.micro_batching.changes.spare_copies import SpareCopies
from lightning_memkit.micro_batching.changes.step_changes import StepChange
from lightning_memkit.utilities import generators

BYTES = (bytearray, array)
_ABSENT = object()
_RUN_BYTES, _MOST_RUNS = 2**12, 2**6


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


class KeptSample(Kept):
    """Snapshot of a checksum of an array or of bytes too large to be copied in every step.

    Of more than 256 KiB, 64 runs of 4 KiB are looked at, so that a change of few items may be missed; what changes
    can't be undone, and `is_lost` tells. Smaller arrays are restored from a spare copy.
    """

    def __init__(self, place: Place, owner: Any, spares: SpareCopies | None = None) -> None:
        self.place, self._owner, self._sum = place, owner, _checksum(owner)
        whole = isinstance(owner, np.ndarray) and owner.nbytes <= _RUN_BYTES * _MOST_RUNS and self._sum
        self._spare = spares.of_array(owner, self._sum) if whole and spares is not None else None

    @property
    def is_lost(self) -> bool:
        """Whether its values have changed, and can't be restored."""
        return self._spare is None and self._sum != _checksum(self._owner)

    @override
    def changes(self) -> Iterator[StepChange]:
        if self._sum != _checksum(self._owner):
            yield self.place.change()

    @override
    def now(self, change: StepChange) -> Any:
        return self._owner

    @override
    def before(self, now: Any) -> Any:
        return None

    @override
    def restore(self) -> None:
        if self._spare is not None:
            self._owner[...] = self._spare
        self._sum = _checksum(self._owner)


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


def _checksum(owner: Any) -> int:
    """A checksum of an array's bytes, or of evenly spaced runs of them; 0 for one that does not lie in one piece."""
    if isinstance(owner, np.ndarray):
        if not (owner.flags.c_contiguous or owner.flags.f_contiguous):
            return 0
        seen = owner.ravel(order="K").view(np.uint8)
    else:
        seen = np.frombuffer(owner, np.uint8)
    runs = len(seen) // _RUN_BYTES
    if runs <= _MOST_RUNS:
        return zlib.crc32(seen.data)
    rest = len(seen) - runs * _RUN_BYTES
    spaced = seen[: len(seen) - rest].reshape(runs, _RUN_BYTES)[:: -(-runs // _MOST_RUNS)]
    return zlib.crc32(np.ascontiguousarray(spaced).data)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return _ABSENT

"""Decide how NumPy arrays and bytes are kept: by copy, or by a checksum where a copy in every step costs too much."""

from array import array

import numpy as np

from lightning_memkit.micro_batching.changes.kept_contents import KeptArray, KeptBytes, KeptSample
from lightning_memkit.micro_batching.changes.kept_tensor import Place
from lightning_memkit.micro_batching.changes.spare_copies import SpareCopies

# Bytes; larger arrays, and more of them, are copied in a step only if earlier steps have changed them.
_SMALL_ARRAY, _SMALL_ARRAYS = 2**16, 2**21
_MOST_SAMPLES = 32  # arrays of which checksums are taken in every step


class ArrayWalk:
    """Takes the snapshots of arrays and bytes that a walk finds.

    Args:
        changing: the keys of those to copy; None copies all.
        spares: copies of others from earlier steps.
    """

    def __init__(self, changing: frozenset[tuple[str, str]] | None, spares: SpareCopies | None) -> None:
        self._changing, self._spares = changing, spares
        self._bytes, self._samples = _SMALL_ARRAYS, _MOST_SAMPLES

    def snapshot(
        self, place: Place, value: np.ndarray | bytearray | array
    ) -> KeptArray | KeptBytes | KeptSample | None:
        """A snapshot of an array's values; None of one that the step can't change, or that is not looked at."""
        if isinstance(value, np.ndarray):
            # A memory-mapped file and a read-only array are not state of the step.
            if not value.flags.writeable or isinstance(value, np.memmap):
                return None
            if self._copies(place, value.nbytes):
                return KeptArray(place, value)
        else:
            place = place.of_kind("object") if place.kind in ("attribute", "container") else place
            if self._copies(place, memoryview(value).nbytes):
                return KeptBytes(place, value)
        self._samples -= 1
        if self._samples < 0 or (isinstance(value, np.ndarray) and value.dtype == object):
            return None
        return KeptSample(place, value, self._spares)

    def _copies(self, place: Place, size: int) -> bool:
        """Whether an array of so many bytes is copied: one that steps change, or a small one."""
        if self._changing is None or place.key in self._changing:
            return True
        small = size <= min(_SMALL_ARRAY, self._bytes)
        self._bytes -= size if small else 0
        return small

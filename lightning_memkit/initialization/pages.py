"""Return the memory of values that are no longer needed to the system before it is freed."""

import ctypes
import sys
from functools import cache
from mmap import PAGESIZE
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_DONTNEED = 4  # MADV_DONTNEED: private memory keeps its addresses but loses its pages
_SMALLEST_BYTES = 2**20
_PIECE_BYTES = 2**20


def drop_pages(tensor: Tensor) -> None:
    """Discard a host tensor's values and their resident memory; its address stays valid and writable.

    An allocator keeps freed memory that lies between blocks in use, so staging memory would stay resident.
    Does nothing below 1 MiB, on other systems than Linux, and on other devices.

    Args:
        tensor: contiguous; nobody may read its storage afterwards.
    """
    if _droppable(tensor):
        _drop(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def move_values(source: Tensor, target: Tensor) -> None:
    """Copy values to a tensor of another dtype and discard the source's; both are never wholly resident.

    Args:
        source: as in `drop_pages`.
        target: of the same shape.
    """
    if not _droppable(source) or not target.is_contiguous():
        target.copy_(source)
        return
    dropped = source.data_ptr()
    length = _PIECE_BYTES // source.element_size()
    pieces = zip(source.view(-1).split(length), target.view(-1).split(length), strict=True)
    for values, place in pieces:
        place.copy_(values)
        dropped = _drop(dropped, values.data_ptr() + values.nbytes)


def _droppable(tensor: Tensor) -> bool:
    large = tensor.device.type == "cpu" and tensor.nbytes >= _SMALLEST_BYTES
    if isinstance(tensor, FakeTensor):  # of a prediction: it has no pages, and address 0 is not its own
        return False
    return large and tensor.is_contiguous() and _madvise() is not None


def _drop(start: int, end: int) -> int:
    """Drop the pages that lie wholly between two addresses; returns the address up to which it did."""
    first, last = -(-start // PAGESIZE) * PAGESIZE, end // PAGESIZE * PAGESIZE
    if last > first:
        _madvise()(first, last - first, _DONTNEED)  # may fail, as for locked pages, which then stay
    return max(start, last)


@cache
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    found = ctypes.CDLL(None).madvise
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found

"""Give the memory of values that nobody reads again back to the system at once, before it is freed."""

import ctypes
import sys
from functools import cache
from mmap import PAGESIZE
from typing import Any

from torch import Tensor

_DONTNEED = 4  # MADV_DONTNEED: private memory keeps its addresses and loses its pages
_SMALLEST_BYTES = 2**20
_PIECE_BYTES = 2**20


def drop_pages(tensor: Tensor) -> None:
    """Lose a host tensor's values and the resident memory that they take; its address stays, and can be written.

    An allocator keeps freed memory that lies between blocks in use: what was staged there would stay resident. Below
    1 MiB, off Linux and on other devices nothing happens.

    Args:
        tensor: contiguous; nobody may read its storage any more.
    """
    if _droppable(tensor):
        _drop(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def move_values(source: Tensor, target: Tensor) -> None:
    """Copy values to a tensor of another dtype and lose the source's; the two are never in memory as a whole.

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
    return large and tensor.is_contiguous() and _madvise() is not None


def _drop(start: int, end: int) -> int:
    """Drop the pages that lie between two addresses as a whole; where the last one ends."""
    first, last = -(-start // PAGESIZE) * PAGESIZE, end // PAGESIZE * PAGESIZE
    if last > first:
        _madvise()(first, last - first, _DONTNEED)  # what the system keeps, such as locked pages, stays
    return max(start, last)


@cache
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    found = ctypes.CDLL(None).madvise
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found

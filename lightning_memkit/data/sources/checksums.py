"""CRC-32 checksums of arrays, and of several arrays together; about a second a gigabyte."""

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_AT_ONCE = 2**20  # values at a time


def crc_of(array: NDArray[Any], kind: Any = None, crc: int = 0) -> int:
    """The checksum of an array's values, converted to a dtype a chunk at a time.

    Args:
        array: One-dimensional values.
        kind: The dtype whose bytes count; None: the array's own.
        crc: The checksum of what comes before.
    """
    for begin in range(0, len(array), _AT_ONCE):
        block = np.ascontiguousarray(array[begin : begin + _AT_ONCE], dtype=kind)
        crc = zlib.crc32(block.view(np.uint8), crc)  # pyright: ignore[reportArgumentType]
    return crc


def checksum_of(crcs: Iterable[int]) -> str:
    """One checksum of several, eight hexadecimal digits."""
    return f"{zlib.crc32(repr(list(crcs)).encode()):08x}"

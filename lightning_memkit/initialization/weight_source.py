"""The interface of a source of weights: names with shapes and dtypes, and copies of boxes of values."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Box = tuple[tuple[int, int], ...]  # start and end index along each dimension
PIECE_BYTES = 16 * 2**20  # a copy between devices and dtypes makes a temporary of at most this size


@dataclass(frozen=True)
class Entry:
    """A stored tensor.

    Args:
        shape: its sizes.
        dtype: as stored.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightSource(Protocol):
    """Files whose headers were read and found complete, but whose values were not read yet."""

    entries: dict[str, Entry]

    def check(self, wanted: Mapping[str, Box]) -> None:
        """Verify what is about to be read (boxes of stored tensors by name) by checksums, if there are any.

        Raises:
            WeightsError: it has changed since it was written.
        """
        ...

    def copy_into(self, name: str, box: Box, target: Tensor) -> None:
        """Copy a box of a stored tensor into a plain tensor of its size, at that one's dtype and device."""
        ...


def whole(entry: Entry) -> Box:
    """The box that covers a whole tensor."""
    return tuple((0, size) for size in entry.shape)


def pieces(box: Box, item_bytes: int) -> Iterator[Box]:
    """Split a box along its first dimension into chunks of 16 MiB, or of one row each."""
    if not box:
        yield box
        return
    (start, stop), rest = box[0], box[1:]
    row_bytes = max(1, math.prod(b - a for a, b in rest) * max(item_bytes, 4))
    rows = max(1, PIECE_BYTES // row_bytes)
    for first in range(start, stop, rows):
        yield (first, min(first + rows, stop)), *rest


def copy_in_pieces(read: Callable[[Box], Tensor], box: Box, target: Tensor) -> None:
    """Copy a box chunk by chunk, so that there is never a second copy of a large tensor."""
    for piece in pieces(box, target.element_size()):
        place = target[piece[0][0] - box[0][0] : piece[0][1] - box[0][0]] if piece else target
        place.copy_(read(piece))

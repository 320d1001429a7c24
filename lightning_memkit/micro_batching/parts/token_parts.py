"""Split a padded batch by tokens, not rows: short rows share a micro-batch, and their padding is removed.

A batch of rows of different lengths is padded to its longest row. In micro-batches of a fixed number of
*rows*, short rows are computed at that length, too. Here rows are sorted by length, and a micro-batch takes
as many as a number of *tokens* allows, including the padding that is left. Every row is still computed once;
only the grouping changes.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.micro_batching.splitting import named_tensors, picked_rows, rebuilt

MASK_NAMES = ("attention_mask", "padding_mask", "mask")
_MULTIPLE = 8  # matrix units are fastest at lengths that are multiples of it


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Where the rows of a padded batch hold tokens.

    Args:
        first: for each row, the first column that is not padding.
        stop: for each row, the column after the last one that is not padding.
        columns: the number of columns of the whole batch.
    """

    first: Tensor
    stop: Tensor
    columns: int

    @property
    def lengths(self) -> list[int]:
        """The number of columns that each row needs."""
        return (self.stop - self.first).tolist()


def extent_of(batch: Any) -> Extent | None:
    """Where a batch's rows hold tokens, by its mask (an integer or bool matrix, 0 on padding), if any.

    The mask is an entry of a mapping or a field of a dataclass, named `attention_mask`, `padding_mask` or
    `mask`.
    """
    if isinstance(batch, Mapping):
        found = next((batch[name] for name in MASK_NAMES if name in batch), None)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        found = next((getattr(batch, name) for name in MASK_NAMES if hasattr(batch, name)), None)
    else:
        found = None
    if not isinstance(found, Tensor) or found.ndim != 2 or found.is_floating_point() or found.shape[1] == 0:
        return None
    kept = found != 0
    columns = found.shape[1]
    first = kept.int().argmax(1)
    stop = columns - kept.flip(1).int().argmax(1)
    empty = ~kept.any(1)
    return Extent(first=first.masked_fill(empty, 0), stop=stop.masked_fill(empty, 1), columns=columns)


@dataclass(frozen=True, kw_only=True)
class TokenPart:
    """One micro-batch: its rows in the batch, and the columns that it keeps."""

    rows: tuple[int, ...]
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """Rows times columns, including the padding that is left."""
        return len(self.rows) * (self.stop - self.start)


def parts_by_tokens(extent: Extent, most_tokens: int) -> list[TokenPart]:
    """Few micro-batches of at most `most_tokens` each, the longest rows first; longer rows are alone."""
    first, stop = extent.first.tolist(), extent.stop.tolist()
    order = sorted(range(len(first)), key=lambda row: (first[row] - stop[row], row))
    parts: list[TokenPart] = []
    rows: list[int] = []
    start, end = extent.columns, 0
    for row in order:
        wider = _aligned(min(start, first[row]), max(end, stop[row]), extent.columns)
        if rows and (len(rows) + 1) * (wider[1] - wider[0]) > most_tokens:
            parts.append(TokenPart(rows=tuple(rows), start=start, stop=end))
            rows = []
            wider = _aligned(first[row], stop[row], extent.columns)
        rows.append(row)
        start, end = wider
    return [*parts, TokenPart(rows=tuple(rows), start=start, stop=end)]


def _aligned(start: int, stop: int, columns: int) -> tuple[int, int]:
    """Widen a range of columns, on the side of the padding, to a multiple of 8."""
    missing = -(stop - start) % _MULTIPLE
    if start == 0:
        return start, min(columns, stop + missing)
    return max(0, start - missing), stop


def wide_tensors(batch: Any) -> frozenset[str]:
    """The names of the tensors that are as wide as the batch's mask."""
    extent = extent_of(batch)
    if extent is None:
        return frozenset()
    return frozenset(
        name
        for name, tensor in named_tensors(batch, "")
        if tensor.ndim > 1 and tensor.shape[1] == extent.columns
    )


def cuts_padding_alone(batch: Any, places: Sequence[TokenPart], wide: frozenset[str]) -> bool:
    """Whether the columns that these parts leave out hold the same value everywhere, in each tensor named in `wide`.

    Or numbers that count columns, as positions do. A tensor that happens to be as wide as the batch's tokens, such as
    rows of neighbors, holds something else there. Waits for the device once.
    """
    tensors = [tensor for name, tensor in named_tensors(batch, "") if name in wide]
    if not tensors:
        return True
    rows, columns = tensors[0].shape[:2]
    stays = torch.zeros(rows, columns, dtype=torch.bool)
    for place in places:
        stays[list(place.rows), place.start : place.stop] = True
    left_out = (~stays).nonzero()
    if not len(left_out):
        return True
    (row, column), told = left_out[0].tolist(), []
    for tensor in tensors:
        own = stays.to(tensor.device).view(rows, columns, *[1] * (tensor.ndim - 2))
        value = tensor[row, column]
        steps = (
            torch.arange(columns, device=tensor.device).view(1, columns, *[1] * (tensor.ndim - 2)) - column
        )
        is_constant = ((tensor == value) | own).all()
        counts = (
            ((tensor - value == steps) | own).all()
            if tensor.dtype in (torch.int64, torch.int32)
            else is_constant
        )
        told.append(is_constant | counts)
    return bool(torch.stack(told).all())


def take_part(batch: Any, part: TokenPart, wide: frozenset[str]) -> Any:
    """A micro-batch of any nested batch: its rows of every tensor, and its columns of those named in `wide`.

    Tensors are copied on their own device. Lists of one plain value a row are taken by row, too.
    """
    narrowed = {id(tensor) for name, tensor in named_tensors(batch, "") if name in wide}

    def take(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item[:, part.start : part.stop] if id(item) in narrowed else item
        return rebuilt(item, take)

    return picked_rows(take(batch), part.rows)


def widened(output: Any, part: TokenPart, columns: int) -> Any:
    """Pad a step's output for a micro-batch to the width of the batch, with zeros in the removed columns.

    This applies to tensors whose first two sizes are the micro-batch's rows and columns; others are kept.
    """
    if not isinstance(output, Tensor):
        return rebuilt(output, lambda item: widened(item, part, columns))
    kept = part.stop - part.start
    if output.ndim < 2 or output.shape[:2] != (len(part.rows), kept) or kept == columns:
        return output
    whole = output.new_zeros((len(part.rows), columns, *output.shape[2:]))
    whole[:, part.start : part.stop] = output
    return whole

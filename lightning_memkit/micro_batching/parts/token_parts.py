"""Parts of a padded batch by tokens, not rows: short rows go together in one part, and their padding is cut off.

A batch of unlike lengths is padded to its longest row. In parts of so many *rows* each, short rows are computed at
that length, too. Here rows are sorted by length, and a part takes as many as a number of *tokens* allows, counted
with the padding that is left. Without padding nothing but the partition changes.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_memkit.micro_batching.splitting import named_tensors, picked_rows, rebuilt

MASK_NAMES = ("attention_mask", "padding_mask", "mask")
_MULTIPLE = 8  # lengths that matrix units like


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Where the rows of a padded batch hold tokens.

    Args:
        first: the first column that is no padding, for each row.
        stop: the column after the last one.
        columns: columns of the whole batch.
    """

    first: Tensor
    stop: Tensor
    columns: int

    @property
    def lengths(self) -> list[int]:
        """Columns that each row needs."""
        return (self.stop - self.first).tolist()


def extent_of(batch: Any) -> Extent | None:
    """Where a batch's rows hold tokens, by its mask: an integer or bool matrix that is 0 on padding; else None.

    The mask is an entry of a mapping or a field of a dataclass, named `attention_mask`, `padding_mask` or `mask`.
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
    """One part: its rows in the batch, and the columns that it keeps."""

    rows: tuple[int, ...]
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """Rows times columns, padding that is left included."""
        return len(self.rows) * (self.stop - self.start)


def parts_by_tokens(extent: Extent, most_tokens: int) -> list[TokenPart]:
    """Few parts of at most so many tokens each, the longest rows first; a row that is longer is its own part."""
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
    """Some columns more, on the side where padding is, so that their number is a multiple of 8."""
    missing = -(stop - start) % _MULTIPLE
    if start == 0:
        return start, min(columns, stop + missing)
    return max(0, start - missing), stop


def wide_tensors(batch: Any) -> frozenset[str]:
    """The names of the tensors that are as wide as the mask of their batch."""
    extent = extent_of(batch)
    if extent is None:
        return frozenset()
    return frozenset(
        name
        for name, tensor in named_tensors(batch, "")
        if tensor.ndim > 1 and tensor.shape[1] == extent.columns
    )


def take_part(batch: Any, part: TokenPart, wide: frozenset[str]) -> Any:
    """A part of any nested batch: its rows of every tensor, and its columns of those that are named wide.

    Tensors are copied, on the device where they are. Lists of one plain value a row are taken by row, too.
    """
    narrowed = {id(tensor) for name, tensor in named_tensors(batch, "") if name in wide}

    def take(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item[:, part.start : part.stop] if id(item) in narrowed else item
        return rebuilt(item, take)

    return picked_rows(take(batch), part.rows)


def widened(output: Any, part: TokenPart, columns: int) -> Any:
    """What a step gave for a part, as wide as the batch: zeros stand in the columns that were cut off.

    It applies to tensors of a row for each of the part's and a column for each of the part's.
    """
    if not isinstance(output, Tensor):
        return rebuilt(output, lambda item: widened(item, part, columns))
    kept = part.stop - part.start
    if output.ndim < 2 or output.shape[:2] != (len(part.rows), kept) or kept == columns:
        return output
    whole = output.new_zeros((len(part.rows), columns, *output.shape[2:]))
    whole[:, part.start : part.stop] = output
    return whole

"""A batch's micro-batches, and which rows are in which."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_memkit.micro_batching import SplitError, picked_rows, split_batch
from lightning_memkit.micro_batching.parts.token_parts import (
    TokenPart,
    widened,
)

Splitter = Callable[[Any, Sequence[int]], Sequence[Any]]


@dataclass(kw_only=True)
class Cut:
    """A split batch: its micro-batches, their sizes, and where each is from unless it is a run of rows.

    Args:
        parts: the micro-batches.
        sizes: the number of samples in each.
        places: the rows and columns of each, where they are formed by tokens.
        columns: of the batch, with `places`.
    """

    parts: list[Any]
    sizes: list[int]
    places: list[TokenPart] | None = None
    columns: int = 0

    def as_wide_as_the_batch(self, index: int, output: Any) -> Any:
        """What the step returned for a micro-batch, padded to the columns of the whole batch."""
        return output if self.places is None else widened(output, self.places[index], self.columns)

    def rows_of(self, index: int) -> list[int]:
        """The indices of the batch's rows in a micro-batch."""
        if self.places is not None:
            return list(self.places[index].rows)
        first = sum(self.sizes[:index])
        return list(range(first, first + self.sizes[index]))

    def rows(self, indices: Sequence[int]) -> list[int] | None:
        """The indices of the batch's rows in some micro-batches; None where they are in order."""
        return None if self.places is None else [row for i in indices for row in self.places[i].rows]


def rows_together(
    batch: Any, cut: Cut, split: Splitter | None, first: int, second: int, *, adjacent: bool
) -> tuple[Any, list[Any]] | None:
    """The rows of two micro-batches as one, and as two; None where such a batch can't be made.

    `adjacent`: rows can't be picked out of the batch, so that only neighbours can be joined.
    """
    rows = cut.rows_of(first), cut.rows_of(second)
    if not adjacent:
        try:
            return picked_rows(batch, [*rows[0], *rows[1]]), [picked_rows(batch, own) for own in rows]
        except (SplitError, TypeError, ValueError, RuntimeError):
            return None  # structures of the user's own
    if second != first + 1:
        return None
    before, after = rows[0][0], sum(cut.sizes) - rows[1][-1] - 1
    sizes = [size for size in (before, len(rows[0]) + len(rows[1]), after) if size]
    return split_batch(batch, sizes, split=split)[1 if before else 0], [cut.parts[first], cut.parts[second]]

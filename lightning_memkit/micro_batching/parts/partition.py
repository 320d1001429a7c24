"""How batches are split: into runs of rows, or by tokens where padded rows go without their padding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_memkit.micro_batching import (
    SplitError,
    Weigher,
    batch_size,
    even_sizes,
    picked_rows,
    split_batch,
)
from lightning_memkit.micro_batching.changes.composed_state import ComposedState
from lightning_memkit.micro_batching.graph.loss_rules import LossRules
from lightning_memkit.micro_batching.graph.rests import RestRules
from lightning_memkit.micro_batching.parts.token_parts import (
    TokenPart,
    extent_of,
    parts_by_tokens,
    take_part,
    wide_tensors,
    widened,
)
from lightning_memkit.micro_batching.shares.batch_counts import Foretelling

Splitter = Callable[[Any, Sequence[int]], Sequence[Any]]

WHOLE = 2**62  # samples in a part: any batch
_LESS_PADDING = 0.9  # of the tokens: what makes copying and sorting rows worth while


@dataclass(kw_only=True)
class Partition:
    """How batches are split.

    Args:
        micro_batch_size: the most samples in a part.
        weigh: what a part holds of what the loss is a mean over.
        summed: the loss is a sum: every part weighs 1.
        split: the user's own splitter.
        whole: batches are not split at all.
        held: this batch is not split: as a whole it has no loss.
        rules: how the loss's terms add up, where its graph shows it: micro-batches are weighed by what each shows of
            itself, and `weigh` is not asked.
        foretold: numbers of the batch that were in proportion to the divisors so far, by rule.
        state: attributes and lists that the step changes, which parts leave as the batch would.
        unlike: the loss's terms have unlike shares, or one may count nothing: their values are noted, and the loss's
            is put together from them.
        rests: how what has no gradient in the losses of parts makes the batch's, with `rules`.
        surveyed: the terms' totals are read off forwards without a backward before each batch.
        counts_nothing: the index of a batch that does not count at all, which is surveyed alone.
        has_lone: the indices of batches in which divisors may not be counts, likewise.
        row_tokens: the length of the worst batch's rows, where parts of a padded batch may be formed by tokens:
            short rows together, without padding, `micro_batch_size` times so many in a part.
        wide: the tensors that are as wide as the mask, and were shown to go without padding.
        fewest: the fewest samples that the step runs on (batch normalization does not on one): no part holds less,
            though one may then hold more than `micro_batch_size`.
    """

    micro_batch_size: int
    weigh: Weigher = batch_size
    summed: bool = False
    split: Splitter | None = None
    whole: bool = False
    held: bool = False
    rules: LossRules | None = None
    foretold: Foretelling = field(default_factory=Foretelling)
    state: ComposedState | None = None
    unlike: bool = False
    rests: RestRules | None = None
    surveyed: bool = False
    counts_nothing: int | None = None
    has_lone: range = range(0)
    row_tokens: int | None = None
    wide: frozenset[str] = frozenset()
    fewest: int = 1

    def looks_up(self, batch_idx: int) -> bool:
        """Whether divisors in a whole batch are looked up before it runs: another attempt at it would ask for them."""
        sums = self.rules.looked_up if self.rules is not None else ()
        is_known = all(map(self.foretold.is_constant, sums))
        return batch_idx in self.has_lone or not is_known

    def cut(self, batch: Any) -> "Cut":
        """The parts of a batch."""
        if self.whole or self.held:
            return Cut(parts=[batch], sizes=[1])
        sizes = even_sizes(batch_size(batch), self.micro_batch_size, self.fewest)
        if len(sizes) == 1:
            return Cut(parts=[batch], sizes=sizes)
        by_tokens = self._cut_by_tokens(batch)
        return by_tokens or Cut(parts=split_batch(batch, sizes, split=self.split), sizes=sizes)

    def _cut_by_tokens(self, batch: Any) -> "Cut | None":
        """Parts by tokens, where that computes a tenth less of padding, or the same in fewer parts."""
        if self.row_tokens is None or self.split is not None or self.fewest > 1:
            return None
        extent = extent_of(batch)
        if extent is None or not self.wide <= wide_tensors(batch):
            return None
        places = parts_by_tokens(extent, self.micro_batch_size * self.row_tokens)
        rows = batch_size(batch)
        saves = sum(place.tokens for place in places) < _LESS_PADDING * rows * extent.columns
        if not saves and len(places) >= -(-rows // self.micro_batch_size):
            return None
        parts = [take_part(batch, place, self.wide) for place in places]
        return Cut(
            parts=parts, sizes=[len(place.rows) for place in places], places=places, columns=extent.columns
        )


@dataclass(kw_only=True)
class Cut:
    """A batch in parts: each with its number of samples, and where it is from, if it is not a run of rows."""

    parts: list[Any]
    sizes: list[int]
    places: list[TokenPart] | None = None
    columns: int = 0

    def as_wide_as_the_batch(self, index: int, output: Any) -> Any:
        """What the step gave for a part, with the columns that the part does without."""
        return output if self.places is None else widened(output, self.places[index], self.columns)

    def rows_of(self, index: int) -> list[int]:
        """The batch's rows that a part holds."""
        if self.places is not None:
            return list(self.places[index].rows)
        first = sum(self.sizes[:index])
        return list(range(first, first + self.sizes[index]))

    def rows(self, indices: Sequence[int]) -> list[int] | None:
        """The batch's rows that some parts hold; None where they are in order."""
        return None if self.places is None else [row for i in indices for row in self.places[i].rows]


def rows_together(
    batch: Any, cut: Cut, split: Splitter | None, first: int, second: int, *, adjacent: bool
) -> tuple[Any, list[Any]] | None:
    """The rows of two parts of a batch as one, and as two; None where such a batch can't be made.

    `adjacent`: rows can't be picked out of the batch, and only neighbours are one.
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

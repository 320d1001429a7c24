"""Continues a plan of batches on another number of ranks: each step keeps its rows, and the present ranks divide them.

The plan stays that of the ranks on which training began, in this epoch and later ones. So a run may change
its number of ranks any number of times, and each step has the rows that it would have had on the first ranks,
every row once.
"""

import heapq
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_memkit.data.batching.batch_plan import BatchPlan, Epoch, PlanOptions
from lightning_memkit.data.batching.collate import rounded_length
from lightning_memkit.data.packing.layout import Packing


@dataclass(frozen=True, kw_only=True)
class CutRows:
    """Some of the rows that result from cutting others in two, between documents; those with most documents are cut.

    Attributes:
        rows: Numbers of the rows that are cut.
        number: How many rows they become.
        chosen: Which of the resulting rows are meant.
    """

    rows: NDArray[np.integer]
    number: int
    chosen: NDArray[np.integer]

    def __len__(self) -> int:
        return len(self.chosen)

    def of(self, packing: Packing) -> Packing:
        """The chosen rows."""
        return _cut(packing, self.rows, self.number).in_order(self.chosen)


Batch = NDArray[np.integer] | CutRows


class SharedPlan:
    """The steps of a plan, divided among another number of ranks than it was made for; sorts the rows of each step.

    A step with fewer rows than ranks is cut between documents. If it has too few documents for that, the last
    steps of an epoch are regrouped among themselves.

    Args:
        plan: The plan for the ranks that training began on.
        packing: Its rows.
        options: The limits of each present rank.
        ranks: Number of processes that divide a step now.
        multiple_of: A batch's length is rounded up to a multiple of this.
        least_rows: The least rows of the last steps, as an earlier resume has decided it.

    Attributes:
        least_rows: The same, for this resume; 0: as many as planned.

    Raises:
        ValueError: some step has too few rows for the ranks, and can't be cut.
    """

    def __init__(
        self,
        plan: BatchPlan,
        packing: Packing,
        options: PlanOptions,
        *,
        ranks: int,
        multiple_of: int = 1,
        least_rows: int = 0,
    ) -> None:
        self.first, self.packing, self.ranks = plan, packing, ranks
        self._options, self._multiple_of = options, multiple_of
        self.steps, self.dropped_rows = plan.steps, plan.dropped_rows
        self.least_rows = max(least_rows, self._least_rows())

    def epoch(self, number: int) -> "SharedEpoch":
        """The batches of an epoch."""
        return SharedEpoch(self, self.first.epoch(number), self.least_rows)

    @property
    def most_tokens(self) -> int:
        """The most tokens, padding included, of a batch within the limits of the present ranks."""
        options, rows = self._options, self.packing.rows
        longest = self._padded(int(self.packing.row_tokens.max())) if rows else 0
        most = min(options.batch_size or rows, rows) * longest
        return min(most, options.batch_tokens or most)

    def padded_tokens(self, batch: Batch) -> int:
        """Tokens of a batch, padding included."""
        is_cut = isinstance(batch, CutRows)
        lengths = batch.of(self.packing).row_tokens if is_cut else self.packing.row_tokens[batch]
        return len(batch) * self._padded(int(lengths.max()))

    def shares(self, lengths: NDArray[np.integer]) -> list[NDArray[np.integer]]:
        """Which rows of a step, given their lengths, each rank gets."""
        if self.ranks == 1:
            return [np.arange(len(lengths))]
        order = np.argsort(-lengths, kind="stable")
        if self.first.is_even:
            # Back and forth over the ranks, so that they get rows of similar lengths.
            turn, at = np.divmod(np.arange(len(order)), self.ranks)
            of_rank = np.where(turn % 2, self.ranks - 1 - at, at)
            return [order[of_rank == rank] for rank in range(self.ranks)]
        return [order[begin:end] for begin, end in self._alike(lengths[order])]

    def _alike(self, lengths: NDArray[np.integer]) -> list[tuple[int, int]]:
        """One range of rows [longest first] for each rank, so that the largest has the fewest padded tokens."""
        padded = [self._padded(int(length)) for length in lengths]
        most_rows = self._options.batch_size or len(padded)
        low, high = padded[0], padded[0] * len(padded)
        while low < high:
            middle = (low + high) // 2
            fits = len(_ranges(padded, middle, most_rows)) <= self.ranks
            low, high = (low, middle) if fits else (middle + 1, high)
        heap = [(begin - end, begin) for begin, end in _ranges(padded, low, most_rows)]
        heapq.heapify(heap)
        while len(heap) < self.ranks:
            size, begin = heapq.heappop(heap)
            half = -size // 2
            heapq.heappush(heap, (-half, begin))
            heapq.heappush(heap, (size + half, begin + half))
        return sorted((begin, begin - size) for size, begin in heap)

    def _padded(self, length: int) -> int:
        return rounded_length(length, self.packing.context, self._multiple_of)

    def _least_rows(self) -> int:
        """The least rows that the last steps must have; 0 if all steps have enough rows, or can be cut."""
        plan, packing, ranks = self.first, self.packing, self.ranks
        sizes = plan.least_rows_of_steps()
        short = [size for size in sizes if size < ranks]
        if not short:
            return 0
        if plan.is_even and packing.pieces - plan.dropped_rows >= plan.steps * ranks:
            return ranks
        fewest_pieces = np.sort(np.diff(packing.offsets))[: short[0]]
        if not plan.is_even and fewest_pieces.sum() >= ranks:
            return 0
        raise ValueError(
            f"A step of {plan.ranks} rank(s), on which training began, has {min(short)} rows, too few for {ranks} "
            "ranks, and too few documents are in them to cut rows; resume on at most "
            f"{min(short)} rank(s) with the same rows or tokens a step, or load the weights alone."
        )


class SharedEpoch:
    """The batches of one epoch of a `SharedPlan`."""

    def __init__(self, plan: SharedPlan, epoch: Epoch, least_rows: int) -> None:
        self._plan, self._epoch = plan, epoch
        self._least_rows = least_rows
        self.step = lru_cache(maxsize=2)(self._of_step)  # ranks are queried one by one

    def batch(self, step: int, rank: int) -> Batch:
        """The rows of a step on a rank, at least one."""
        return self.step(step)[rank]

    @cached_property
    def redealt(self) -> tuple[int, tuple[int, ...]]:
        """The first of the last steps that are regrouped, and the rows of each of them; ``(steps, ())``: none.

        As few steps as possible are regrouped; if it is a single one, it keeps its documents.
        """
        plan, least = self._plan, self._least_rows
        if not least or len(self._planned(plan.steps - 1)) >= least <= len(
            self._planned(max(plan.steps - 2, 0))
        ):
            return plan.steps, ()
        counts = np.diff(plan.packing.offsets)
        pieces = rows = 0
        for steps, first in enumerate(range(plan.steps - 1, -1, -1), 1):
            of_step = self._planned(first)
            rows, pieces = rows + len(of_step), pieces + int(counts[of_step].sum())
            number = max(rows, steps * least)
            if pieces >= number and (steps > 1 or first == 0 or len(self._planned(first - 1)) >= least):
                last = max(least, len(self._planned(plan.steps - 1)))
                if steps <= 2:
                    return first, (number - last, last)[-steps:]
                return first, tuple(number * (n + 1) // steps - number * n // steps for n in range(steps))
        raise AssertionError("the plan has checked that there are enough documents")

    def _of_step(self, step: int) -> list[Batch]:
        plan = self._plan
        first, sizes = self.redealt
        if step >= first:
            rows = np.concatenate([self._planned(each) for each in range(first, plan.steps)])
            number, begin = sum(sizes), sum(sizes[: step - first])
            chosen = np.arange(begin, begin + sizes[step - first])
        else:
            rows = self._planned(step)
            if len(rows) >= plan.ranks:
                return [rows[share] for share in plan.shares(plan.packing.row_tokens[rows])]
            number, chosen = plan.ranks, np.arange(plan.ranks)
        lengths = _cut(plan.packing, rows, number).row_tokens[chosen]
        return [CutRows(rows=rows, number=number, chosen=chosen[share]) for share in plan.shares(lengths)]

    def _planned(self, step: int) -> NDArray[np.integer]:
        return np.concatenate([self._epoch.batch(step, rank) for rank in range(self._plan.first.ranks)])


def _cut(packing: Packing, rows: NDArray[np.integer], number: int) -> Packing:
    return packing.in_order(rows).divisible(number)


def _ranges(lengths: list[int], tokens: int, rows: int) -> list[tuple[int, int]]:
    """Divide lengths [longest first] into the fewest ranges that each stay within these padded tokens and rows."""
    ends = [0]
    while ends[-1] < len(lengths):
        each = min(rows, max(1, tokens // lengths[ends[-1]]))
        ends.append(min(ends[-1] + each, len(lengths)))
    return list(pairwise(ends))

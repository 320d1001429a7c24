"""Rows to steps and ranks by their attention work, so that no rank waits for another; nothing is sent or saved.

Equally full rows are not equally much work: attention's grows with the squares of the documents' lengths. In
each step every rank gets a row out of each group of rows of about the same work, so the ranks of a step finish
together. The groups of a step come from all over, from one of short documents to one of long ones.

The deal of an epoch follows from (seed, epoch, work of the rows) alone. Each rank computes it for itself, and to
resume, the number of batches done is enough.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Rows of so many groups, but of no more than this share of all, change places at random before they are grouped:
# so rows meet others in every epoch, and their work stays similar.
_GROUPS_MIXED = 2
_SHARE_MIXED = 1 / 256
_STEPS_EVENED = 1024


@dataclass(frozen=True, kw_only=True)
class DealOptions:
    """How rows go to steps and ranks.

    Attributes:
        batch_size: Rows a step, on each rank.
        ranks: Processes that share the rows.
        seed: Of every epoch's order.
        drop_last: Leaves out the rows that don't fill a step; other rows in every epoch.
        group: Rows of similar work that go into one step together; None: one for each rank. To go on with another
            number of ranks in the middle of an epoch, give the number that it was begun with.

    Raises:
        ValueError: a number is out of range, or ``group`` does not divide the rows of a step.
    """

    batch_size: int
    ranks: int = 1
    seed: int = 0
    drop_last: bool = False
    group: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("ranks", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} is below {least}; choose {least} or more.")
        if self.group is not None and (self.group < 1 or self.rows_per_step % self.group):
            raise ValueError(
                f"group={self.group} does not divide the {self.rows_per_step} rows of a step "
                f"(batch_size={self.batch_size} on ranks={self.ranks}); choose the number of ranks."
            )

    @property
    def rows_per_step(self) -> int:
        """Rows a step, over all ranks."""
        return self.batch_size * self.ranks

    @property
    def rows_per_group(self) -> int:
        """Rows of similar work that go into one step together."""
        return self.group or self.ranks


@dataclass(frozen=True, kw_only=True)
class Balance:
    """How evenly work is dealt; 1 is perfect.

    Attributes:
        ranks: Work of the rank with the most, over the mean of the ranks; the whole epoch.
        waiting: Time of all steps over the time they would take if no rank had to wait for the slowest.
        steps: Work of the step with the most, over the mean of the full steps.
    """

    ranks: float
    waiting: float
    steps: float


@dataclass(frozen=True, kw_only=True)
class Deal:
    """An epoch's rows; 8 bytes a row.

    Attributes:
        rows: Numbers of the rows, [steps, ranks, batch_size]. In the last steps some are -1: no row.
        dropped_rows: Rows that no rank gets.
    """

    rows: NDArray[np.int64]
    dropped_rows: int

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, step: int, rank: int) -> NDArray[np.int64]:
        """The rows of a step on a rank, at least one; the k-th is of similar work on all ranks."""
        rows = self.rows[step, rank]
        return rows[rows >= 0]

    def balance(self, work: ArrayLike) -> Balance:
        """How evenly this work of the rows is dealt."""
        dealt = np.append(np.asarray(work), 0)[self.rows].sum(axis=2, dtype=np.float64)
        of_rank = dealt.sum(axis=0)
        full = dealt[(self.rows >= 0).all(axis=(1, 2))].sum(axis=1)
        return Balance(
            ranks=float(of_rank.max() / of_rank.mean()),
            waiting=float(dealt.max(axis=1).sum() / dealt.mean(axis=1).sum()),
            steps=float(full.max() / full.mean()) if len(full) else 1.0,
        )


def deal_rows(work: ArrayLike, options: DealOptions, *, epoch: int = 0) -> Deal:
    """Each row to one rank and step; ranks get equally many batches of equal work, in a new order every epoch.

    The rows left for the last step are dealt, too, in smaller batches: there ranks differ by a row unless the
    number of ranks divides that of the rows (``Packing.divisible`` sees to that). If they are fewer than the
    ranks, the step before gives up as many as are needed.

    Args:
        work: Of each row, [rows], above 0: ``packing.row_work()``.
        options: How.
        epoch: Which order.

    Raises:
        ValueError: there are too few rows to give each rank one.
    """
    costs = np.asarray(work)
    whole, odd_sizes = _steps(len(costs), options)
    if not whole and not odd_sizes:
        raise ValueError(
            f"{len(costs)} rows are too few for batch_size={options.batch_size} on {options.ranks} rank(s) with "
            f"drop_last={options.drop_last}; add documents, or lower the batch size or the context."
        )
    if odd_sizes and odd_sizes[-1] < options.ranks:
        raise ValueError(
            f"The last step has {odd_sizes[-1]} rows (group={options.group}), too few for {options.ranks} ranks; "
            "take drop_last=True, or at most as many ranks as the epoch was begun with."
        )
    rng = np.random.default_rng((options.seed, epoch))
    dropped = len(costs) - whole * options.rows_per_step - sum(odd_sizes)
    drawn = rng.permutation(len(costs))[dropped:]
    left = drawn[_most_first(costs[drawn])]
    odd_steps = []
    for size in odd_sizes:
        odd_steps.append(np.full((1, options.rows_per_step), -1))
        odd_steps[-1][0, :size], left = _take(left, size, options.rows_per_group, rng)
    steps = np.concatenate((_whole_steps(left, options, rng), *odd_steps))
    return Deal(rows=_to_ranks(steps, np.append(costs, -1), options, rng), dropped_rows=dropped)


def _most_first(costs: NDArray) -> NDArray[np.int64]:
    return np.argsort(-costs.astype(np.float64), axis=-1, kind="stable")


def _steps(rows: int, options: DealOptions) -> tuple[int, list[int]]:
    """The number of full steps, and the rows of those behind them."""
    whole, rest = divmod(rows, options.rows_per_step)
    if not rest or options.drop_last:
        return whole, []
    missing = options.rows_per_group - rest
    if missing <= 0:
        return whole, [rest]
    if whole and options.rows_per_step - missing >= options.rows_per_group:
        return whole - 1, [options.rows_per_step - missing, options.rows_per_group]
    return whole, []


def _take(
    left: NDArray[np.int64], size: int, group: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """So many of the sorted rows, in groups of neighbours, for a step that is not full; and the others."""
    groups, rest = divmod(size, group)
    first = rng.choice(len(left) // group, groups, replace=False) * group
    is_taken = np.zeros(len(left), bool)
    is_taken[(first[:, None] + np.arange(group)).ravel()] = True
    if rest:
        # Not all ranks get one of these: they are from the half of less work.
        others = np.flatnonzero(~is_taken)
        last = len(others) - rest
        begin = rng.integers(min(len(others) // 2, last), last, endpoint=True)
        is_taken[others[begin : begin + rest]] = True
    return left[is_taken], left[~is_taken]


def _whole_steps(
    most_first: NDArray[np.int64], options: DealOptions, rng: np.random.Generator
) -> NDArray[np.int64]:
    """These rows as steps, [steps, rows_per_step]."""
    group = options.rows_per_group
    reach = min(_GROUPS_MIXED * group, _SHARE_MIXED * len(most_first))
    mixed = np.argsort(np.arange(len(most_first)) + reach * rng.random(len(most_first)))
    # A step takes one group from each stratum of groups of similar work.
    strata = most_first[mixed].reshape(options.rows_per_step // group, -1, group)
    return np.concatenate([stratum[rng.permutation(len(stratum))] for stratum in strata], axis=1)


def _to_ranks(
    steps: NDArray[np.int64], costs: NDArray, options: DealOptions, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Each step's rows to its ranks, [steps, ranks, batch_size]."""
    sorted_steps = np.take_along_axis(steps, _most_first(costs[steps]), axis=1)
    similar = sorted_steps.reshape(len(steps), options.batch_size, options.ranks)
    rows = np.empty_like(similar)
    so_far = rng.random((len(steps), options.ranks))  # less than any work: it only decides who is first
    for number in range(options.batch_size):
        # The rank with the least so far gets the most of what is similar.
        least_first = np.argsort(so_far, axis=1)
        np.put_along_axis(rows[:, number], least_first, similar[:, number], axis=1)
        so_far += costs[rows[:, number]]
    _even_out(rows, so_far)
    order = np.argsort(rng.random((len(steps), options.batch_size)), axis=1)
    return np.take_along_axis(rows, order[:, :, None], axis=1).swapaxes(1, 2)


def _even_out(rows: NDArray[np.int64], work: NDArray[np.float64]) -> None:
    """Exchanges ranks in the most uneven steps until the epoch's sums of work [steps, ranks] are alike; in place."""
    uneven = np.argsort(-np.ptp(work, axis=1), kind="stable")[:_STEPS_EVENED]
    of_rank = work.sum(axis=0) - work[uneven].sum(axis=0)
    for step in uneven:
        least_first, most_first = np.argsort(of_rank), np.argsort(-work[step])
        rows[step][:, least_first] = rows[step][:, most_first]
        of_rank[least_first] += work[step, most_first]

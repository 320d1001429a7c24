"""Assigns rows to steps and ranks by attention work, so that no rank waits for another; nothing is sent or saved.

Equally full rows are not equally much work: attention's work grows with the squares of the documents'
lengths. In each step every rank gets one row out of each group of rows with similar work, so that the ranks
of a step finish together. The groups of a step cover the whole range, from short documents to long ones.

The assignment for an epoch follows from (seed, epoch, work of the rows) alone. Each rank computes it by
itself, and a resume needs only the number of batches done.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Before rows are grouped, they are shuffled over a distance of this many groups, but at most this fraction of
# all rows: so they meet other rows in every epoch, and a group's work stays similar.
_GROUPS_MIXED = 2
_SHARE_MIXED = 1 / 256
_STEPS_EVENED = 1024


@dataclass(frozen=True, kw_only=True)
class DealOptions:
    """How rows are assigned to steps and ranks.

    Attributes:
        batch_size: Rows a step, on each rank.
        ranks: Number of processes.
        seed: The seed of every epoch's order.
        drop_last: Drops the rows that don't fill a step; other rows in every epoch.
        group: Number of rows of similar work that go into one step together; None: one for each rank. To
            continue in the middle of an epoch with another number of ranks, set it to the number that the
            epoch began with.

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
        """Number of rows of similar work that go into one step together."""
        return self.group or self.ranks


@dataclass(frozen=True, kw_only=True)
class Balance:
    """How evenly work is distributed; 1 is perfect.

    Attributes:
        ranks: Work of the rank with the most, relative to the mean of the ranks; over the whole epoch.
        waiting: Time of all steps, relative to the time if no rank had to wait for the slowest.
        steps: Work of the step with the most, relative to the mean of the full steps.
    """

    ranks: float
    waiting: float
    steps: float


@dataclass(frozen=True, kw_only=True)
class Deal:
    """The assignment of an epoch's rows; 8 bytes a row.

    Attributes:
        rows: Row numbers, [steps, ranks, batch_size]. In the last steps some are -1: no row.
        dropped_rows: Number of rows that no rank gets.
    """

    rows: NDArray[np.int64]
    dropped_rows: int

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, step: int, rank: int) -> NDArray[np.int64]:
        """The rows of a step on a rank, at least one; the k-th has similar work on all ranks."""
        rows = self.rows[step, rank]
        return rows[rows >= 0]

    def balance(self, work: ArrayLike) -> Balance:
        """How evenly the given work of the rows is distributed."""
        dealt = np.append(np.asarray(work), 0)[self.rows].sum(axis=2, dtype=np.float64)
        of_rank = dealt.sum(axis=0)
        full = dealt[(self.rows >= 0).all(axis=(1, 2))].sum(axis=1)
        return Balance(
            ranks=float(of_rank.max() / of_rank.mean()),
            waiting=float(dealt.max(axis=1).sum() / dealt.mean(axis=1).sum()),
            steps=float(full.max() / full.mean()) if len(full) else 1.0,
        )


def deal_rows(work: ArrayLike, options: DealOptions, *, epoch: int = 0) -> Deal:
    """Assign each row to one rank and step; ranks get equally many batches of equal work, in a new order every epoch.

    The rows left for the last step are assigned, too, in smaller batches: there ranks differ by a row unless
    the number of ranks divides the number of rows (``Packing.divisible`` ensures this). If fewer rows than
    ranks are left, the step before gives up as many rows as are needed.

    Args:
        work: The work of each row, [rows], above 0: ``packing.row_work()``.
        options: How rows are assigned.
        epoch: Selects the order.

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
    """The number of full steps, and the numbers of rows of the steps after them."""
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
    """This many of the sorted rows, in groups of neighbours, for a step that is not full; and the remaining rows."""
    groups, rest = divmod(size, group)
    first = rng.choice(len(left) // group, groups, replace=False) * group
    is_taken = np.zeros(len(left), bool)
    is_taken[(first[:, None] + np.arange(group)).ravel()] = True
    if rest:
        # Not every rank gets one of these, so they come from the half with less work.
        others = np.flatnonzero(~is_taken)
        last = len(others) - rest
        begin = rng.integers(min(len(others) // 2, last), last, endpoint=True)
        is_taken[others[begin : begin + rest]] = True
    return left[is_taken], left[~is_taken]


def _whole_steps(
    most_first: NDArray[np.int64], options: DealOptions, rng: np.random.Generator
) -> NDArray[np.int64]:
    """The rows arranged in steps, [steps, rows_per_step]."""
    group = options.rows_per_group
    reach = min(_GROUPS_MIXED * group, _SHARE_MIXED * len(most_first))
    mixed = np.argsort(np.arange(len(most_first)) + reach * rng.random(len(most_first)))
    # A step takes one group from each stratum of groups of similar work.
    strata = most_first[mixed].reshape(options.rows_per_step // group, -1, group)
    return np.concatenate([stratum[rng.permutation(len(stratum))] for stratum in strata], axis=1)


def _to_ranks(
    steps: NDArray[np.int64], costs: NDArray, options: DealOptions, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Assign each step's rows to its ranks, [steps, ranks, batch_size]."""
    sorted_steps = np.take_along_axis(steps, _most_first(costs[steps]), axis=1)
    similar = sorted_steps.reshape(len(steps), options.batch_size, options.ranks)
    rows = np.empty_like(similar)
    so_far = rng.random((len(steps), options.ranks))  # less than any row's work: it only breaks ties
    for number in range(options.batch_size):
        # The rank with the least work so far gets the row with the most work of its group.
        least_first = np.argsort(so_far, axis=1)
        np.put_along_axis(rows[:, number], least_first, similar[:, number], axis=1)
        so_far += costs[rows[:, number]]
    _even_out(rows, so_far)
    order = np.argsort(rng.random((len(steps), options.batch_size)), axis=1)
    return np.take_along_axis(rows, order[:, :, None], axis=1).swapaxes(1, 2)


def _even_out(rows: NDArray[np.int64], work: NDArray[np.float64]) -> None:
    """Exchange ranks in the most uneven steps, in place, until the epoch's sums of work [steps, ranks] are similar."""
    uneven = np.argsort(-np.ptp(work, axis=1), kind="stable")[:_STEPS_EVENED]
    of_rank = work.sum(axis=0) - work[uneven].sum(axis=0)
    for step in uneven:
        least_first, most_first = np.argsort(of_rank), np.argsort(-work[step])
        rows[step][:, least_first] = rows[step][:, most_first]
        of_rank[least_first] += work[step, most_first]

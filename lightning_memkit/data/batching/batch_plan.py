"""Plans which rank gets which rows in which batch; every rank computes the same plan, with equally many batches.

The number of steps is the same in every epoch, because Lightning reads it only once.
"""

import heapq
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_memkit.data.batching.collate import rounded_length
from lightning_memkit.data.batching.dealing import DealOptions, deal_rows
from lightning_memkit.data.packing.layout import Packing
from lightning_memkit.utilities.given import refuse_no_number

Padding = Literal["longest", "bucket"]
_BITS = 4  # lengths within a bucket differ by at most a sixteenth
_NEARLY_FULL = 0.9


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How rows become batches.

    Attributes:
        batch_size: At most this many rows a batch, on each rank; None: as many as ``batch_tokens`` allows.
        batch_tokens: At most this many tokens a batch, padding included; None: any number.
        padding: ``longest`` batches rows at random, ``bucket`` batches rows of similar length.
        shuffle: Uses a new order in every epoch.
        seed: The seed of the orders.
        drop_last: Drops the rows that would make a last, smaller step.
    """

    batch_size: int | None = None
    batch_tokens: int | None = None
    padding: Padding = "longest"
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "batch_tokens", "seed"):
            refuse_no_number(name, getattr(self, name), or_none=name != "seed")
        if self.batch_size is None and self.batch_tokens is None:
            raise ValueError("batch_size and batch_tokens are both None; one of them limits a batch.")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} is below 1; a batch has at least one row.")
        if self.batch_tokens is not None and self.batch_tokens < 1:
            raise ValueError(
                f"batch_tokens={self.batch_tokens} is below 1; it is the number of tokens in a batch."
            )
        if self.padding not in get_args(Padding):
            raise ValueError(f"padding={self.padding!r} is unknown; choose one of {get_args(Padding)}.")


class Epoch(Protocol):
    """The batches of one epoch."""

    def batch(self, step: int, rank: int) -> Any:
        """The rows of a step on a rank, at least one."""
        ...


@dataclass(frozen=True, kw_only=True)
class Ordered:
    """An epoch whose batch ``step * ranks + rank`` is the range ``bounds[batch]`` of an order."""

    order: NDArray[np.integer]
    bounds: NDArray[np.int64]
    ranks: int

    @staticmethod
    def nothing() -> "Ordered":
        """An epoch without a step."""
        return Ordered(order=np.zeros(0, np.int64), bounds=np.zeros((0, 2), np.int64), ranks=1)

    def batch(self, step: int, rank: int) -> NDArray[np.integer]:
        """The rows of a step on a rank, at least one."""
        return self.order[slice(*self.bounds[step * self.ranks + rank])]


class BatchPlan:
    """Every row once an epoch, in batches within the limits.

    * With ``batch_size`` alone, or if rows are nearly full, all batches but the last have the same size, and
      rows are assigned to ranks by their attention work.
    * With ``padding="bucket"``, batches go from the longest rows to the shortest, and the steps are then
      shuffled.
    * Rows of many lengths under ``padding="longest"`` and ``batch_tokens`` are grouped once, by the seed;
      epochs differ in the order of the batches.

    Args:
        packing: The rows.
        options: How they become batches.
        ranks: Number of processes.
        multiple_of: A batch's length is rounded up to a multiple of this.

    Attributes:
        ranks: Number of processes.
        is_even: Whether steps have equally many rows, except for the last two.

    Raises:
        ValueError: a row is longer than ``batch_tokens``.
    """

    def __init__(
        self, packing: Packing, options: PlanOptions, *, ranks: int = 1, multiple_of: int = 1
    ) -> None:
        self._packing, self._options, self._multiple_of = packing, options, multiple_of
        self.ranks = ranks
        self._lengths = packing.row_tokens
        rows = len(self._lengths)
        self._longest = self._padded(int(self._lengths.max())) if rows else 0
        refuse_long_rows(self._longest, options.batch_tokens)
        self._order: NDArray[np.integer] | None = None  # set if it is the same in every epoch
        self._buckets: NDArray[np.integer] | None = None
        self._work: NDArray[np.int64] | None = None
        self.is_even = False
        if options.padding == "bucket":
            self._buckets = _bucket(self._lengths)
            bounds = _in_whole_steps(self._bucket_bounds(), ranks, options.drop_last)
        elif options.batch_tokens is None or not rows or self._lengths.mean() >= _NEARLY_FULL * self._longest:
            self.is_even = True
            self._rows_each = self._capacity(self._longest)
            self._work = packing.row_work() if options.shuffle else None
            bounds = _even_steps(rows, self._rows_each, ranks, options.drop_last)
        else:
            self._order = self._drawn(0)
            bounds = _in_whole_steps(self._greedy_bounds(), ranks, options.drop_last)
        self._bounds = np.array(bounds, np.int64).reshape(-1, 2)
        self.steps = len(self._bounds) // ranks
        self.dropped_rows = rows - int(np.diff(self._bounds).sum())

    def epoch(self, number: int) -> Epoch:
        """The batches of an epoch."""
        options, bounds = self._options, self._bounds
        if self._work is not None:
            how = DealOptions(
                batch_size=self._rows_each, ranks=self.ranks, seed=options.seed, drop_last=options.drop_last
            )
            return deal_rows(self._work, how, epoch=number)
        if self._order is not None:
            order = self._order
            bounds = self._generator(number).permutation(bounds) if options.shuffle else bounds
        elif self._buckets is not None:
            # From the longest bucket to the shortest, at random within a bucket.
            drawn = self._drawn(number)
            order = drawn[np.argsort(-self._buckets[drawn], kind="stable")]
            if options.shuffle:
                steps = self._generator(number, 1).permutation(self.steps)
                bounds = bounds.reshape(self.steps, self.ranks, 2)[steps].reshape(-1, 2)
        else:
            order = np.arange(len(self._lengths))
        return Ordered(order=order, bounds=bounds, ranks=self.ranks)

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest possible batch, padding included."""
        rows = min(self._options.batch_size or len(self._lengths), len(self._lengths))
        return min(rows * self._longest, self._options.batch_tokens or rows * self._longest)

    def identity(self) -> dict[str, int]:
        """The values that, together with the seed, determine a position in an epoch."""
        return {
            "rows": len(self._lengths),
            "tokens": self._packing.tokens,
            **per_step(self._options, self.ranks),
            "steps": self.steps,
        }

    def least_rows_of_steps(self) -> list[int]:
        """Rows of each step over all ranks, in any epoch; the fewest if epochs group batches differently."""
        sizes = np.diff(self._bounds).ravel()
        if self._order is not None and self._options.shuffle:
            return [int(np.sort(sizes)[: self.ranks].sum())] if len(sizes) else []
        return sizes.reshape(self.steps, self.ranks).sum(axis=1).tolist()

    def _padded(self, longest: int) -> int:
        return rounded_length(longest, self._packing.context, self._multiple_of)

    def _capacity(self, length: int) -> int:
        """How many rows of this length fit in a batch."""
        rows = self._options.batch_size or max(len(self._lengths), 1)
        if self._options.batch_tokens is not None and length:
            rows = min(rows, self._options.batch_tokens // length)
        return max(rows, 1)

    def _generator(self, *numbers: int) -> np.random.Generator:
        return np.random.default_rng((self._options.seed, *numbers))

    def _drawn(self, epoch: int) -> NDArray[np.int64]:
        rows = len(self._lengths)
        return self._generator(epoch).permutation(rows) if self._options.shuffle else np.arange(rows)

    def _bucket_bounds(self) -> list[tuple[int, int]]:
        assert self._buckets is not None
        sizes, counts = np.unique(-self._buckets, return_counts=True)
        ends = [0]
        for size, end in zip((-sizes).tolist(), np.cumsum(counts).tolist(), strict=True):
            if ends[-1] < end:
                each = self._capacity(min(self._padded(size), self._longest))
                ends.extend(range(ends[-1] + each, end + each, each))
        ends = [min(end, len(self._lengths)) for end in ends]
        if len(ends) > 2 and 2 * (ends[-1] - ends[-2]) < ends[-2] - ends[-3]:
            # A last batch of a few rows could not be divided among more ranks after a resume.
            ends[-2] = (ends[-1] + ends[-3]) // 2
        return list(pairwise(ends))

    def _greedy_bounds(self) -> list[tuple[int, int]]:
        assert self._order is not None
        lengths = self._lengths[self._order].astype(np.int64)
        rounded = -(-lengths // self._multiple_of) * self._multiple_of
        padded = np.maximum(lengths, np.minimum(rounded, self._packing.context))
        bounds, begin = [], 0
        while begin < len(padded):
            here = padded[begin : begin + self._capacity(int(padded[begin]))]
            tokens = np.maximum.accumulate(here) * np.arange(1, len(here) + 1)
            fits = int(np.searchsorted(tokens, self._options.batch_tokens or 0, side="right"))
            bounds.append((begin, begin + fits))
            begin += fits
        if len(bounds) > 1:  # as in buckets: a last batch of a few rows takes some of the one before
            (first, cut), (_, end) = bounds[-2:]
            middle = (first + end) // 2
            if 2 * (end - cut) < cut - first and self._within(padded[middle:end]):
                bounds[-2:] = [(first, middle), (middle, end)]
        return bounds

    def _within(self, padded: NDArray[np.int64]) -> bool:
        return len(padded) * int(padded.max()) <= (self._options.batch_tokens or 0)


def per_step(options: PlanOptions, ranks: int) -> dict[str, int]:
    """The most rows and tokens of a step over this many ranks; 0: any number."""
    return {
        "rows_per_step": (options.batch_size or 0) * ranks,
        "tokens_per_step": (options.batch_tokens or 0) * ranks,
    }


def refuse_long_rows(longest: int, batch_tokens: int | None) -> None:
    """Raise if a row, with its padding, has more tokens than a batch may have."""
    if batch_tokens is not None and longest > batch_tokens:
        raise ValueError(
            f"batch_tokens={batch_tokens} is less than the longest row's {longest} tokens; a batch holds at least one "
            "row. Raise it, or lower the context."
        )


def _bucket(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Every length rounded up to five significant binary digits."""
    digits = np.frexp(np.maximum(lengths, 1).astype(np.float64))[1]
    shift = np.maximum(digits - 1 - _BITS, 0)
    return -(-lengths.astype(np.int64) >> shift) << shift


def _even_steps(rows: int, batch_size: int, ranks: int, drop_last: bool) -> list[tuple[int, int]]:
    """Batches of one size; all ranks divide the remaining rows, at least one each, as in ``deal_rows``."""
    whole, rest = divmod(rows, batch_size * ranks)
    ends = [(step + 1) * batch_size * ranks for step in range(whole)]
    if rest and not drop_last:
        if rest >= ranks:
            ends.append(rows)
        elif whole and batch_size > 1:
            ends[-1] = rows - ranks
            ends.append(rows)
        # With one row a rank and step, the remaining rows can't be divided and are dropped.
    return [
        (begin + (end - begin) * rank // ranks, begin + (end - begin) * (rank + 1) // ranks)
        for begin, end in pairwise([0, *ends])
        for rank in range(ranks)
    ]


def _in_whole_steps(bounds: list[tuple[int, int]], ranks: int, drop_last: bool) -> list[tuple[int, int]]:
    """A batch for every rank in every step: the largest are halved until their number is a multiple of ranks."""
    left = len(bounds) % ranks
    if left and drop_last and len(bounds) > ranks:
        return bounds[: len(bounds) - left]
    ends = dict(bounds)
    largest = [(begin - end, begin) for begin, end in bounds]
    heapq.heapify(largest)
    for _ in range(-len(bounds) % ranks):
        size, begin = heapq.heappop(largest)
        if size == -1:  # only batches of one row are left: the rest can't be divided and is dropped
            return bounds[: len(bounds) - left]
        middle, end = begin - size // 2, ends[begin]
        ends[begin], ends[middle] = middle, end
        heapq.heappush(largest, (begin - middle, begin))
        heapq.heappush(largest, (middle - end, middle))
    return sorted(ends.items())

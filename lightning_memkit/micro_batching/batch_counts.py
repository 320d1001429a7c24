"""Numbers that a batch tells before it runs: rows, labels, what its masks leave. Some of them foretell a divisor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.micro_batching.splitting import (
    IGNORED_LABEL,
    SplittableBatch,
    batch_size,
    named_tensors,
)

_LARGEST = 2**20  # elements of a tensor that is counted in every batch
_SAME = 1e-9


@dataclass(frozen=True)
class BatchCount:
    """One number of a batch: `kind` of its `place`-th tensor (of the columns from `start` on), or of the batch.

    Args:
        kind: `"rows"`, `"own"` (the batch's own `weight()`), `"labels"` (not -100), `"nonzero"` or `"sum"`.
        place: which tensor, in the order in which they stand.
        start: the first column that counts: losses that shift inside leave out a row's first label.
    """

    kind: str
    place: int = 0
    start: int = 0

    def __call__(self, batch: Any) -> float:
        """The number of a batch, or of a micro-batch of it."""
        if self.kind == "rows":
            return float(batch_size(batch))
        if self.kind == "own":
            return float(batch.weight())
        tensor = [tensor for _, tensor in named_tensors(batch, "")][self.place]
        tensor = tensor[..., self.start :] if self.start else tensor
        return float(_COUNTS[self.kind](tensor))


_COUNTS: dict[str, Callable[[Tensor], Tensor]] = {
    "labels": lambda tensor: (tensor != IGNORED_LABEL).sum(),
    "nonzero": torch.count_nonzero,
    "sum": lambda tensor: tensor.double().sum(),
}


def counts_of(batch: Any) -> list[BatchCount]:
    """All the numbers of a batch that could foretell a divisor."""
    found = [BatchCount("own")] if isinstance(batch, SplittableBatch) else []
    for place, (_, tensor) in enumerate(named_tensors(batch, "")):
        if tensor.ndim == 0 or tensor.numel() > _LARGEST or tensor.is_complex() or tensor.is_sparse:
            continue
        kinds = ["sum"] if tensor.is_floating_point() else ["labels", "nonzero", "sum"]
        starts = (0, 1) if tensor.ndim > 1 else (0,)
        found += [BatchCount(kind, place, start) for kind in kinds for start in starts]
    return [*found, BatchCount("rows")]


@dataclass(frozen=True)
class Foretold:
    """A number of the batch that a divisor is `ratio` times of."""

    count: BatchCount
    ratio: float

    def total(self, batch: Any) -> float:
        """What the divisors of a batch's micro-batches will add up to."""
        return self.ratio * self.count(batch)


def foretelling(batches: Sequence[Any], divisors: Sequence[float]) -> list[Foretold]:
    """The numbers that were in proportion to a divisor in all these batches, the likeliest first.

    Args:
        batches: a batch and its micro-batches.
        divisors: what a term counted in each.
    """
    found = []
    for count in counts_of(batches[0]):
        numbers = [count(batch) for batch in batches]
        if not numbers[0] or not divisors[0]:
            continue
        ratio = divisors[0] / numbers[0]
        if all(
            abs(n * ratio - d) <= _SAME * abs(divisors[0]) for n, d in zip(numbers, divisors, strict=True)
        ):
            found.append(Foretold(count, ratio))
    return found


class Foretelling:
    """The numbers of a batch that foretell the divisors of a loss's terms, while none has foretold wrongly.

    Args:
        ways: for each term, the numbers that its divisor was in proportion to so far.
    """

    def __init__(self, ways: Sequence[list[Foretold]] = ()) -> None:
        self.ways = ways
        # Terms that were zero in a micro-batch of which they counted nothing: their value tells it.
        self._masked: set[int] = set()
        # Terms of which a divisor of 1 was taken for one that only keeps them from being divided by zero.
        self._emptied: set[int] = set()

    def total(self, index: int, batch: Any) -> float | None:
        """What the divisors of a batch's micro-batches will add up to; None where this is not foretold."""
        ways = self.ways[index] if index < len(self.ways) else []
        return ways[0].total(batch) if ways else None

    def forget_wrong(self, batch: Any, counted: Sequence[float]) -> None:
        """Numbers that foretold a total wrongly are not asked again."""
        for ways, count in zip(self.ways, counted, strict=False):
            ways[:] = [way for way in ways if abs(way.total(batch) - count) <= _SAME * abs(count)]

    def holds_none(self, index: int, part: Any, count: float) -> bool | None:
        """Whether a micro-batch holds nothing of what foretells a term's divisor; None where that was wrong.

        It is wrong where it holds some, and the term counts another number.
        """
        ways = self.ways[index] if index < len(self.ways) else []
        if index in self._masked:
            return False
        numbers = [way.total(part) for way in ways]
        right = [not number or abs(number - count) <= _SAME * abs(count) for number in numbers]
        if not all(right):
            ways[:] = [way for way, is_right in zip(ways, right, strict=True) if is_right]
            return None
        if ways and not any(numbers):
            self._emptied.add(index)
            return True
        return False

    def is_misread_by(self, index: int) -> bool:
        """Note a micro-batch in which a term is nothing, as it counts nothing; whether one before was taken for such.

        A term that is nothing where it counts nothing never has a divisor of 1 that does not count.
        """
        self._masked.add(index)
        was_emptied = index in self._emptied
        self._emptied.discard(index)
        return was_emptied

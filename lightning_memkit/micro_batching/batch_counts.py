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


class Emptiness:
    """Whether a micro-batch holds nothing of what foretells a term's divisor.

    A number of which it does hold some, and another number than the term counts, foretold by chance: it is not asked
    again.

    Args:
        foretold: for each term, the numbers of a batch that its divisor was in proportion to; wrong ones are removed.
        part: the micro-batch.
    """

    def __init__(self, foretold: Sequence[list[Foretold]], part: Any) -> None:
        self._foretold, self._part = foretold, part
        self.was_wrong = False

    def __call__(self, index: int, count: float) -> bool:
        """Whether it holds none of what the term counts, by its divisor `count`."""
        ways = self._foretold[index] if index < len(self._foretold) else []
        numbers = [(way, way.total(self._part)) for way in ways]
        right = [way for way, number in numbers if not number or abs(number - count) <= _SAME * abs(count)]
        if len(right) < len(ways):
            self.was_wrong = True
            ways[:] = right
        return bool(right) and not any(number for way, number in numbers if way in right)

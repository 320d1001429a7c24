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
# Batches whose totals are looked up before divisors are believed that may be kept from less: to be a number of the
# batch; to be what is counted, or a constant.
_CONFIRMED, _ENOUGH_LOOKS = 3, 12


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

    One that did is never asked again: rows of one kind agree with many numbers by chance.

    Args:
        ways: for each term, the numbers that its divisor was in proportion to so far.
    """

    def __init__(self, ways: Sequence[list[Foretold]] = ()) -> None:
        self._begin([list(own) for own in ways])

    def _begin(self, ways: list[list[Foretold]], terms: Sequence[object] = ()) -> None:
        self.ways, self._terms = ways, tuple(terms)
        self._wrong = [set[BatchCount]() for _ in ways]
        self._confirmed = [0] * len(ways)  # totals that agreed with those of `ways`, compared and looked up
        self._looked_up = [0] * len(ways)  # of these, the ones that were looked up
        self._sums = [_Looks() for _ in ways]  # at the divisors of seeming sums
        self._least = [_Looks() for _ in ways]

    def learn(
        self,
        batches: Sequence[Any],
        divisors: Sequence[Sequence[float] | None],
        terms: Sequence[object] = (),
    ) -> None:
        """Keep the numbers that agree with a batch and its micro-batches; others only where none was known.

        Args:
            batches: the batch, and its micro-batches.
            divisors: what each term counted in each of them; None for a term that is no mean.
            terms: which terms these are. Of others than before nothing is known.
        """
        if len(divisors) != len(self.ways) or tuple(terms) != self._terms:
            self._begin([[] for _ in divisors], terms)
        for index, counted in enumerate(divisors):
            if counted is None or not counted[0]:
                continue
            found = foretelling(batches, counted)
            known = {way.count: way.ratio for way in self.ways[index]}
            agree = [
                way for way in found if abs(known.get(way.count, way.ratio) - way.ratio) <= _SAME * way.ratio
            ]
            self._wrong[index].update({*counts_of(batches[0])} - {way.count for way in agree})
            agree = [way for way in agree if way.count not in self._wrong[index]]
            kept = [way for way in agree if way.count in known]
            if not kept:
                self._confirmed[index] = self._looked_up[index] = 0
            self.ways[index] = kept or agree
            self._confirmed[index] += bool(self.ways[index])

    def total(self, index: int, batch: Any) -> float | None:
        """What the divisors of a batch's micro-batches will add up to; None where this is not foretold."""
        ways = self.ways[index] if index < len(self.ways) else []
        return ways[0].total(batch) if ways else None

    def forget_wrong(self, batch: Any, counted: Sequence[float]) -> None:
        """Numbers that foretold a total wrongly are not asked again."""
        for index, count in enumerate(counted[: len(self.ways)]):
            self._keep(
                index, [abs(way.total(batch) - count) <= _SAME * abs(count) for way in self.ways[index]]
            )

    def _keep(self, index: int, right: Sequence[bool]) -> None:
        ways = self.ways[index]
        self._wrong[index].update(
            way.count for way, is_right in zip(ways, right, strict=True) if not is_right
        )
        self.ways[index] = [way for way, is_right in zip(ways, right, strict=True) if is_right]
        if not self.ways[index]:
            self._confirmed[index] = self._looked_up[index] = 0

    def is_least(self, index: int, divisor: float) -> bool:
        """Whether a divisor of a term may be kept from a smaller one: it is the least so far, or one of the first."""
        return index >= len(self._least) or self._least[index].take_in(divisor)

    def unlike(self) -> frozenset[int]:
        """The terms whose divisors add up here and there only."""
        return frozenset(index for index, looks in enumerate(self._least) if looks.is_unlike)

    def doubted(self) -> frozenset[int]:
        """The terms whose divisors have hardly been looked at."""
        return frozenset(index for index, looks in enumerate(self._least) if looks.looked < _CONFIRMED)

    def count_of(self, index: int, part: Any, divisor: float, *, is_one: bool = True) -> float | None:
        """What a micro-batch counts whose divisor may be kept from being less, up to a constant: that or nothing.

        None where nothing tells, see `is_silent`, or what told is wrong.

        Args:
            index: the term's.
            part: the micro-batch.
            divisor: what its term is divided by.
            is_one: by 1, and not by the least that was seen.
        """
        if index < len(self.ways) and (not is_one or not self.is_silent(index)):
            numbers = [way.total(part) for way in self.ways[index]]
            self._keep(
                index,
                [
                    (is_one and not number) or abs(number - divisor) <= _SAME * abs(divisor)
                    for number in numbers
                ],
            )
        if not is_one and index < len(self._least) and self._least[index].are_enough:
            return divisor
        return None if self.is_silent(index, is_one=is_one) else self.ways[index][0].total(part)

    def is_silent(self, index: int, *, is_sum: bool = False, is_one: bool = True) -> bool:
        """Whether nothing tells a divisor that is a count from one that only keeps the term from being nan.

        Rows of one row each are as many as they are divided by, whatever is counted: that alone tells nothing.

        Args:
            index: the term's.
            is_sum: its divisor was the same in all that was compared, and so it seems to be a sum.
            is_one: the divisor is 1, and not the least of others.
        """
        if is_sum:
            return index >= len(self._sums) or not self._sums[index].are_enough
        known = index < len(self.ways) and self.ways[index]
        confirmed = self._looked_up if is_one else self._confirmed
        return not known or confirmed[index] < _CONFIRMED

    def doubt(self, index: int) -> None:
        """A seeming sum is divided by unlike numbers: it is looked up from now on."""
        self._sums[index].learn(is_kept=True)

    def confirm(
        self, index: int, batch: Any, total: float, *, is_kept: bool = False, is_sum: bool = False
    ) -> None:
        """Take in what a term counts in a batch, which was looked up.

        Args:
            index: the term's.
            batch: the batch.
            total: what it counts.
            is_kept: its micro-batches were not divided by what they count.
            is_sum: it seems to be a sum.
        """
        if index >= len(self.ways):
            return
        if is_sum:
            self._sums[index].learn(is_kept=is_kept)
            return
        self._least[index].learn(is_kept=is_kept)
        self._keep(index, [abs(way.total(batch) - total) <= _SAME * abs(total) for way in self.ways[index]])
        if self.ways[index]:
            self._confirmed[index] += 1
            self._looked_up[index] += 1


@dataclass
class _Looks:
    """Whether divisors that a term may be kept at were its own, wherever they were looked at.

    Attributes:
        least: the least of them.
        looked: looks.
        agreed: looks that showed them to be counts, or a sum's own.
        is_kept: one showed what it was kept at.
        is_unlike: so did one at more than the least: no divisor is known to be a count.
    """

    least: float = float("inf")
    looked: int = 0
    agreed: int = 0
    is_kept: bool = False
    is_unlike: bool = False

    @property
    def are_enough(self) -> bool:
        """To look no more."""
        return self.agreed >= _ENOUGH_LOOKS and not self.is_kept and not self.is_unlike

    def take_in(self, divisor: float) -> bool:
        """Whether none was less, or this tells nothing yet; one that is less begins anew."""
        if not 0 < divisor <= self.least * (1 + _SAME):
            return self.is_unlike or self.looked < _CONFIRMED
        if divisor < self.least * (1 - _SAME):
            self.is_unlike = self.is_unlike or self.is_kept
            self.least, self.agreed, self.is_kept = divisor, 0, False
        return True

    def learn(self, *, is_kept: bool) -> None:
        """Take in what a look showed."""
        # The first ones are at all divisors: what is kept there may be more than the least.
        self.is_unlike = self.is_unlike or (is_kept and self.looked < _CONFIRMED)
        self.looked += 1
        self.agreed += not is_kept
        self.is_kept = self.is_kept or is_kept

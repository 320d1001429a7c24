"""Numbers that a batch tells before it runs: rows, labels, what its masks leave. Some of them foretell a divisor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
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


class Shown(Enum):
    """What a term's total in a whole batch, once it was looked up, tells of its micro-batches' divisors."""

    OWN = "own"  # they are counts; those of a sum are the batch's
    KEPT = "kept"  # the least ones may be kept from being less; those of a sum are not the batch's
    UNLIKE = "unlike"  # they don't add up, and that the least ones are kept does not explain it


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
        self._sums = [_Looks() for _ in ways]  # at seeming sums
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

    def may_be_kept(self, index: int, divisor: float) -> bool:
        """Note a divisor of a term; whether it may be kept from being less: the least so far, or one of the first."""
        return index >= len(self._least) or self._least[index].take_in(divisor)

    def unlike(self) -> frozenset[int]:
        """The terms whose divisors add up here and there only."""
        return frozenset(index for index, looks in enumerate(self._least) if looks.is_unlike)

    def doubted(self) -> frozenset[int]:
        """The terms of whose divisors any may be kept: they have hardly been looked at, or one of the first was."""
        return frozenset(index for index, looks in enumerate(self._least) if looks.is_doubted)

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

    def is_silent(self, index: int, *, is_one: bool = True) -> bool:
        """Whether nothing tells a divisor that is a count from one that only keeps the term from being nan.

        Rows of one row each are as many as they are divided by, whatever is counted: that alone tells nothing.

        Args:
            index: the term's.
            is_one: the divisor is 1, and not the least of others.
        """
        known = index < len(self.ways) and self.ways[index]
        confirmed = self._looked_up if is_one else self._confirmed
        return not known or confirmed[index] < _CONFIRMED

    def is_constant(self, index: int) -> bool:
        """Whether a seeming sum's divisor has been its batch's often enough to look no more."""
        return index < len(self._sums) and self._sums[index].are_enough

    def confirm_sum(self, index: int, shown: Shown) -> None:
        """Take in whether a seeming sum's divisor was its batch's."""
        if index < len(self._sums):
            self._sums[index].learn(shown)

    def confirm(self, index: int, batch: Any, total: float, shown: Shown = Shown.OWN) -> None:
        """Take in what a term counts in a batch, which was looked up.

        Args:
            index: the term's.
            batch: the batch.
            total: what it counts.
            shown: what that tells of its micro-batches' divisors.
        """
        if index >= len(self.ways):
            return
        self._least[index].learn(shown)
        self._keep(index, [abs(way.total(batch) - total) <= _SAME * abs(total) for way in self.ways[index]])
        if self.ways[index]:
            self._confirmed[index] += 1
            self._looked_up[index] += 1


@dataclass
class _Looks:
    """What looks have told of the divisors that a term may be kept at.

    Attributes:
        least: the least divisor.
        looked: looks.
        agreed: those since then that showed counts, or a sum's own divisor.
        is_kept: one since then showed what a term was kept at.
        was_kept_early: one of the first did, which are at all divisors.
        is_unlike: divisors that were more than the least did not add up: none is known to be a count.
    """

    least: float = float("inf")
    looked: int = 0
    agreed: int = 0
    is_kept: bool = False
    was_kept_early: bool = False
    is_unlike: bool = False

    @property
    def are_enough(self) -> bool:
        """To look no more."""
        return self.agreed >= _ENOUGH_LOOKS and not (self.is_kept or self.was_kept_early or self.is_unlike)

    @property
    def is_doubted(self) -> bool:
        """Whether any divisor may be kept, not the least alone."""
        return self.was_kept_early or self.looked < _CONFIRMED

    def take_in(self, divisor: float) -> bool:
        """Whether a divisor may be kept; one that is less than all before begins anew."""
        if 0 < divisor < self.least * (1 - _SAME):
            self.is_unlike = self.is_unlike or self.is_kept
            self.least, self.agreed, self.is_kept = divisor, 0, False
        return self.is_unlike or self.is_doubted or 0 < divisor <= self.least * (1 + _SAME)

    def learn(self, shown: Shown) -> None:
        """Take in what a look showed."""
        self.is_unlike = self.is_unlike or shown is Shown.UNLIKE
        self.is_kept = self.is_kept or shown is not Shown.OWN
        self.was_kept_early = self.was_kept_early or (shown is not Shown.OWN and self.looked < _CONFIRMED)
        self.looked += 1
        self.agreed += shown is Shown.OWN

"""Predict the divisors of a batch's loss from numbers that are known before it runs: rows, labels, masks."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import isnan
from typing import Any

from lightning_memkit.micro_batching.shares.batch_numbers import BatchCount, numbers_of

_SAME = 1e-9
# How many looked-up totals must agree before divisors that may be clamped are trusted: as proportional to a
# number of the batch; as counts, or as a constant.
_CONFIRMED, _ENOUGH_LOOKS = 3, 12


@dataclass(frozen=True)
class Foretold:
    """The prediction that a divisor is `ratio` times a number of the batch."""

    count: BatchCount
    ratio: float

    def total(self, batch: Any) -> float:
        """The predicted sum of the divisors of a batch's micro-batches."""
        return self.ratio * self.count(batch)


def foretelling(numbers: Sequence[dict[BatchCount, float]], divisors: Sequence[float]) -> list[Foretold]:
    """The numbers that are proportional to a divisor in all these batches, the likeliest first.

    Args:
        numbers: those of a batch, and of its micro-batches.
        divisors: a term's count in each.
    """
    found = []
    for count, number in numbers[0].items():
        if not number or not divisors[0]:
            continue
        ratio = divisors[0] / number
        if all(
            abs(own[count] * ratio - divisor) <= _SAME * abs(divisors[0])
            for own, divisor in zip(numbers, divisors, strict=True)
        ):
            found.append(Foretold(count, ratio))
    return found


class Shown(Enum):
    """What a term's looked-up total in a whole batch tells of its micro-batches' divisors."""

    OWN = "own"  # they are counts; or, of a sum, equal to the batch's
    KEPT = "kept"  # the least ones may be clamped; or, of a sum, differ from the batch's
    UNLIKE = "unlike"  # they don't add up, and clamping of the least ones does not explain it


class Foretelling:
    """Predicts the divisors of a loss's terms from numbers of the batch, and notes which are clamped.

    A number that predicted wrongly is never used again: in rows of one kind, many numbers are proportional by chance.

    Args:
        ways: for each term, the numbers to which its divisor was proportional so far.
    """

    def __init__(self, ways: Sequence[list[Foretold]] = ()) -> None:
        self._begin([list(own) for own in ways])

    def _begin(self, ways: list[list[Foretold]], terms: Sequence[object] = ()) -> None:
        self.ways, self._terms = ways, tuple(terms)
        self._wrong = [set[BatchCount]() for _ in ways]
        self._confirmed = [0] * len(ways)  # totals, from comparisons and looks, that agreed with `ways`
        self._looked_up = [0] * len(ways)  # those of them that were looked up
        self._sums = [_Looks() for _ in ways]  # at terms that seem to be sums
        self._least = [_Looks() for _ in ways]  # at the least divisors of means
        self._zeros = [_Looks() for _ in ways]  # at micro-batches whose term is zero

    def learn(
        self,
        batches: Sequence[Any],
        divisors: Sequence[Sequence[float] | None],
        terms: Sequence[object] = (),
    ) -> None:
        """Keep the numbers that agree with a batch and its micro-batches; add new ones only if none is left.

        Args:
            batches: the batch, and its micro-batches.
            divisors: for each term, its count in each of them; None for a term that is no mean.
            terms: what identifies the terms; if they differ from the last call's, everything is forgotten.
        """
        if len(divisors) != len(self.ways) or tuple(terms) != self._terms:
            self._begin([[] for _ in divisors], terms)
        whole = numbers_of(batches[0], {way.count for ways in self.ways for way in ways})
        numbers = [numbers_of(batch, whole) for batch in batches[1:]]
        for index, counted in enumerate(divisors):
            if counted is None or not counted[0]:
                continue
            found = foretelling([whole, *numbers], counted)
            known = {way.count: way.ratio for way in self.ways[index]}
            agree = [
                way for way in found if abs(known.get(way.count, way.ratio) - way.ratio) <= _SAME * way.ratio
            ]
            self._wrong[index].update({*whole} - {way.count for way in agree})
            agree = [way for way in agree if way.count not in self._wrong[index]]
            kept = [way for way in agree if way.count in known]
            if not kept:
                self._confirmed[index] = self._looked_up[index] = 0
            self.ways[index] = kept or agree
            self._confirmed[index] += bool(self.ways[index])

    def total(self, index: int, batch: Any) -> float | None:
        """The predicted sum of the divisors of a batch's micro-batches; None without a prediction."""
        ways = self.ways[index] if index < len(self.ways) else []
        totals = (way.total(batch) for way in ways)
        return next((total for total in totals if not isnan(total)), None)

    def forget_wrong(self, batch: Any, counted: Sequence[float]) -> None:
        """Drop the numbers that predicted a total wrongly."""
        for index, count in enumerate(counted[: len(self.ways)]):
            self._keep(index, [_may_be(way.total(batch), count) for way in self.ways[index]])

    def _keep(self, index: int, right: Sequence[bool]) -> None:
        ways = self.ways[index]
        self._wrong[index].update(
            way.count for way, is_right in zip(ways, right, strict=True) if not is_right
        )
        self.ways[index] = [way for way, is_right in zip(ways, right, strict=True) if is_right]
        if not self.ways[index]:
            self._confirmed[index] = self._looked_up[index] = 0

    def may_be_kept(self, index: int, number: float) -> bool:
        """Note what a step divides a term by; True if it may be clamped: it is the least so far, or among the first.

        Args:
            index: the term's index.
            number: the step's own number. Of a mean over another mean, the divisor is this times a number of elements.
        """
        return index >= len(self._least) or self._least[index].take_in(number)

    def is_least(self, index: int, number: float) -> bool:
        """Whether no number that the step divided a term by was less."""
        return index < len(self._least) and number <= self._least[index].least * (1 + _SAME)

    def unlike(self) -> frozenset[int]:
        """The terms whose divisors add up in some batches only."""
        return frozenset(index for index, looks in enumerate(self._least) if looks.is_unlike)

    def doubted(self) -> frozenset[int]:
        """The terms of which any divisor may be clamped: after too few looks, or if one of the first was."""
        return frozenset(index for index, looks in enumerate(self._least) if looks.is_doubted)

    def count_of(self, index: int, part: Any, divisor: float, *, is_one: bool = True) -> float | None:
        """The count of a micro-batch whose divisor may be clamped, up to a constant: the divisor, or nothing.

        None if nothing tells (see `is_silent`), or the numbers that told were wrong.

        Args:
            index: the term's index.
            part: the micro-batch.
            divisor: the divisor of the term.
            is_one: the divisor is 1, rather than the least that was seen.
        """
        if index < len(self.ways) and (not is_one or not self.is_silent(index)):
            numbers = [way.total(part) for way in self.ways[index]]
            self._keep(
                index,
                [(is_one and not number) or _may_be(number, divisor) for number in numbers],
            )
        if not is_one and index < len(self._least) and self._least[index].are_enough:
            return divisor
        return None if self.is_silent(index, is_one=is_one) else self.total(index, part)

    def is_silent(self, index: int, *, is_one: bool = True) -> bool:
        """Whether nothing distinguishes a divisor that is a count from a clamped one.

        A divisor of 1 needs looks: in micro-batches of one row the number of rows is 1 as well, whatever is counted.

        Args:
            index: the term's index.
            is_one: the divisor is 1, rather than the least that was seen.
        """
        known = index < len(self.ways) and self.ways[index]
        confirmed = self._looked_up if is_one else self._confirmed
        return not known or confirmed[index] < _CONFIRMED

    def doubts(self, index: int, count: float, *, is_zero: bool) -> bool:
        """Whether to look up what a micro-batch counts, although a number of the batch tells.

        Some that are told apart by nothing else so far: of labels the positive ones, and those that are not zero. Such
        a number is not believed against a term of value zero, before looks have shown that such rows count; nor for
        other terms, once a look has shown that divisors are clamped, before it was right in twelve looks.

        Args:
            index: the term's index.
            count: what the number tells.
            is_zero: the term's value is exactly zero.
        """
        if not is_zero:
            has_kept = index < len(self._least) and self._least[index].has_kept
            return has_kept and self._looked_up[index] < _ENOUGH_LOOKS
        looks = self._zeros[index] if index < len(self._zeros) else _Looks()
        return bool(count) and (looks.is_kept or looks.agreed < _CONFIRMED)

    def distrust(self) -> None:
        """Look again whether the numbers are right: a batch has values that none before had."""
        self._confirmed, self._looked_up = [0] * len(self.ways), [0] * len(self.ways)

    def look_again(self) -> None:
        """Look once more at divisors that are known as constants or counts: a batch has more or less than others."""
        for looks in [*self._sums, *self._least]:
            looks.agreed = min(looks.agreed, _ENOUGH_LOOKS - 1)

    def confirm_zeros(self, index: int, shown: Shown) -> None:
        """Record what a look showed in whose batch a micro-batch's term was zero."""
        if index < len(self._zeros):
            self._zeros[index].learn(shown)

    def is_constant(self, index: int) -> bool:
        """Whether the divisor of a term that seems a sum equalled its batch's so often that looks can end."""
        return index < len(self._sums) and self._sums[index].are_enough

    def confirm_sum(self, index: int, shown: Shown) -> None:
        """Record whether the divisor of a term that seems a sum was its batch's."""
        if index < len(self._sums):
            self._sums[index].learn(shown)

    def confirm(self, index: int, batch: Any, total: float, shown: Shown = Shown.OWN) -> None:
        """Record a term's looked-up count in a batch.

        Args:
            index: the term's index.
            batch: the batch.
            total: its count.
            shown: what that tells of its micro-batches' divisors.
        """
        if index >= len(self.ways):
            return
        self._least[index].learn(shown)
        self._keep(index, [_may_be(way.total(batch), total) for way in self.ways[index]])
        if self.ways[index]:
            self._confirmed[index] += 1
            self._looked_up[index] += 1


def _may_be(number: float, total: float) -> bool:
    """Whether a number has predicted a total; one that the batch does not have was not wrong."""
    return isnan(number) or abs(number - total) <= _SAME * abs(total)


@dataclass
class _Looks:
    """What looks have shown of a term's divisors, of which the least may be clamped.

    Attributes:
        least: the least divisor so far.
        looked: the number of looks.
        agreed: the looks since `least` was found that showed counts, or a sum's divisor equal to the batch's.
        is_kept: a look since then showed a clamped divisor.
        was_kept_early: one of the first looks did; these are taken at any divisor.
        is_unlike: divisors above the least did not add up, so that none is known to be a count.
    """

    least: float = float("inf")
    looked: int = 0
    agreed: int = 0
    is_kept: bool = False
    was_kept_early: bool = False
    is_unlike: bool = False

    @property
    def are_enough(self) -> bool:
        """Whether looks can end."""
        return self.agreed >= _ENOUGH_LOOKS and not (self.has_kept or self.is_unlike)

    @property
    def has_kept(self) -> bool:
        """Whether a look has shown a clamped divisor."""
        return self.is_kept or self.was_kept_early

    @property
    def is_doubted(self) -> bool:
        """Whether any divisor may be clamped, not only the least."""
        return self.was_kept_early or self.looked < _CONFIRMED

    def take_in(self, divisor: float) -> bool:
        """Note a divisor; True if it may be clamped. One that is less than all before restarts the looks."""
        if 0 < divisor < self.least * (1 - _SAME):
            self.is_unlike = self.is_unlike or self.is_kept
            self.least, self.agreed, self.is_kept = divisor, 0, False
        return self.is_unlike or self.is_doubted or 0 < divisor <= self.least * (1 + _SAME)

    def learn(self, shown: Shown) -> None:
        """Record what a look showed."""
        self.is_unlike = self.is_unlike or shown is Shown.UNLIKE
        self.is_kept = self.is_kept or shown is not Shown.OWN
        self.was_kept_early = self.was_kept_early or (shown is not Shown.OWN and self.looked < _CONFIRMED)
        self.looked += 1
        self.agreed += shown is Shown.OWN

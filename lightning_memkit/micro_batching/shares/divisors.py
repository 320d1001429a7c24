"""The divisors of a batch's terms: which may be clamped instead of counts, and their sums over micro-batches.

A divisor is "kept" from being less if the step clamps it (`n.clamp(min=1)`): then the least divisors need not
be counts.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lightning_memkit.micro_batching.graph.loss_rules import SMALL, LossRules
from lightning_memkit.micro_batching.graph.origins import Origin, origin_of
from lightning_memkit.micro_batching.graph.term_rules import Law, Reading, rounding_of, share_of
from lightning_memkit.micro_batching.shares.batch_counts import Foretelling, Shown
from lightning_memkit.micro_batching.shares.foreseen import LoneCountError, UnforeseenLossError


class LeastDivisors(NamedTuple):
    """The terms of a micro-batch that the step divides by 1, or by the least divisor seen so far.

    Attributes:
        lone: those of which it is unknown whether the divisor is a count or clamped; see `LoneCounts`.
        counts: the counts of the others, by term.
        averaged: those of `lone` whose divisor is a number of the step's own times a number of elements, as of a mean
            over the mean of a mask. If that number is clamped, so may be that of two micro-batches as one, and then
            their divisors add up nevertheless.
    """

    lone: frozenset[int]
    counts: dict[int, float]
    averaged: frozenset[int] = frozenset()


def least_divisors(
    rules: LossRules,
    reading: Reading,
    told: Foretelling | None,
    part: Any,
    own: Sequence[float] | None = None,
) -> LeastDivisors:
    """Find the terms of a micro-batch whose divisor is either a count or clamped (to avoid a zero, mostly).

    A term's value does not tell which: a row beyond its margin has a loss of zero, and counts. What the numbers of the
    batch tell is not always believed, see `Foretelling.doubts`.

    Args:
        rules: how the loss's terms add up.
        reading: the terms of the micro-batch's loss.
        told: tells counts from clamped divisors.
        part: the micro-batch.
        own: what each term counts by `LossRules.counts`: 0 for a value of exactly zero; None to believe the batch.
    """
    lone, counts = set[int](), dict[int, float]()
    for index, rule in enumerate(rules.rules if told is not None else ()):
        assert told is not None
        if index in reading.missing:
            lone.add(index)  # the batch's divisor tells whether it counts nothing
        elif rule.looks_up:
            if rule.law is Law.OWN or not told.is_constant(index):
                lone.add(index)
        elif rule.law is Law.MEAN and reading.is_divided(index):
            divisor, is_one = reading.divisors[index], reading.is_one(index)
            # With an epsilon no divisor is clamped; one near zero counts nothing, see `LossRules.counts`.
            is_own = not rule.excess and not 0 < abs(reading.quotients[index]) <= SMALL
            if not is_one and not (is_own and told.may_be_kept(index, reading.own_number(index))):
                continue
            count = told.count_of(index, part, divisor, is_one=is_one)
            doubts = own is not None and told.doubts(index, count or 0.0, is_zero=not own[index])
            if count is None or doubts:
                lone.add(index)
            else:
                counts[index] = count
    averaged = frozenset(
        index for index in lone if rules.rules[index].law is Law.MEAN and reading.is_averaged(index)
    )
    return LeastDivisors(frozenset(lone), counts, averaged)


def looked_at(rules: LossRules, reading: Reading, counts: Sequence[float]) -> tuple[float, ...]:
    """The numbers that a look at several micro-batches as one gives: counts, or divisors of terms to look up.

    Raises:
        UnforeseenLossError: the step's own number shows in the micro-batches but not in the look, or vice
            versa.
    """
    for index, rule in enumerate(rules.rules):
        if reading.divisors[index] and rule.numbered != reading.is_divided(index):
            raise UnforeseenLossError("a divisor that shows in some micro-batches only")
    return tuple(
        reading.divisors[index] if rule.looks_up else count
        for index, (rule, count) in enumerate(zip(rules.rules, counts, strict=True))
    )


def main_mean(rules: LossRules, totals: Sequence[float]) -> int:
    """The mean by which terms that depend on no row are weighed: the first with a count in the batch."""
    return next((index for index in rules.means if totals[index]), rules.means[0])


class SameTerms:
    """What has to be the same in all micro-batches: where a mean comes from, and the divisors of other terms.

    The whole batch divides two tasks by two numbers. If each micro-batch has one of them, both look like one term,
    unless they judge different heads or columns (`Origin`). The divisor of a term that is no mean is one number in
    all micro-batches, or one that is looked up.

    Args:
        rules: how the loss's terms add up.
        looked_up: by term, the divisor in the whole batch of a term that seems a sum; None if it was not looked up.
        by_itself: the batch's loss is its own, not a part of one over further batches or ranks.

    Attributes:
        origins: of the means; to be handed on to the next batch of a window.
    """

    def __init__(self, rules: LossRules, looked_up: Sequence[float] | None, *, by_itself: bool) -> None:
        self._rules, self._looked_up, self._by_itself = rules, looked_up, by_itself
        self._seen: dict[int, float] = {}
        self.origins: dict[int, Origin] = {}

    def compare(
        self, reading: Reading, dtype: torch.dtype, foretelling: Foretelling | None, lone: frozenset[int]
    ) -> None:
        """Check that a micro-batch has the terms of the others, and divides by what they divide by.

        Raises:
            UnforeseenLossError: it does not.
            LoneCountError: the divisor of a term that seemed to be a sum differs, so it is a number of the step's own:
                it must be looked up in the whole batch.
        """
        for index, rule in enumerate(self._rules.rules):
            mean = reading.of_one[index]
            if mean is None:
                pass
            elif index not in self.origins:
                self.origins[index] = origin_of(mean, further=True)
            elif not self.origins[index].is_of(mean):
                raise UnforeseenLossError(
                    "terms of several heads or columns, one in each micro-batch", rule.name
                )
            if rule.law is Law.MEAN or index in lone:
                continue
            divisor = reading.divisors[index]
            first = self._seen.setdefault(index, divisor)
            if divisor == first or abs(divisor - first) <= rounding_of(dtype) * abs(first):
                continue
            if not rule.looks_up or foretelling is None:
                raise UnforeseenLossError(
                    f"a sum divided by {first:g} and by {divisor:g} in two micro-batches"
                )
            foretelling.confirm_sum(index, Shown.KEPT)
            raise LoneCountError

    def share(self, index: int, divisor: float) -> float:
        """The weight of a term that is a sum, and is divided by another number in the whole batch.

        Raises:
            UnforeseenLossError: further batches or ranks are part of the loss, and its divisor is not known.
        """
        assert self._looked_up is not None
        total = self._looked_up[index]
        share = share_of(divisor, total)
        if share != 1 and not self._by_itself:
            raise UnforeseenLossError(
                f"a term divided by {divisor:g} in micro-batches, and by {total:g} in their batch"
            )
        return share


class BatchSums(NamedTuple):
    """Sums over the micro-batches of a batch (see `StepShares`).

    Args:
        counted: the counts of each term.
        lone: above 0 for terms whose count is not to be trusted.
        fractions: the shares of each mean.
        beside: above 0 for means to which a constant is added below a learned factor.
        shared: the shares of the terms that depend on no row.
        unlike: above 0 if terms were scaled by different shares.
        origins: where the means come from, as `OriginsOfRanks.numbers`.
    """

    counted: list[float]
    lone: list[float]
    fractions: list[float]
    beside: list[float]
    shared: float
    unlike: float
    origins: Sequence[float] = ()

    def averaged(self, average: Callable[[Sequence[float]], list[float]]) -> "BatchSums":
        """The sums over all ranks, divided by their number, by one reduction."""
        size, columns = len(self.counted), (self.counted, self.lone, self.fractions, self.beside)
        flat = average(
            [number for column in columns for number in column] + [self.shared, self.unlike, *self.origins]
        )
        averaged = [flat[place * size : (place + 1) * size] for place in range(len(columns))]
        shared, unlike, *origins = flat[len(columns) * size :]
        return BatchSums(*averaged, shared=shared, unlike=unlike, origins=origins)

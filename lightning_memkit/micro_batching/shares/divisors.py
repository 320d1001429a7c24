"""Divisors of a batch's terms: the least that may be none, what was looked at, and their sums."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lightning_memkit.micro_batching.graph.loss_rules import SMALL, LossRules
from lightning_memkit.micro_batching.graph.term_rules import Law, Reading
from lightning_memkit.micro_batching.shares.batch_counts import Foretelling
from lightning_memkit.micro_batching.shares.foreseen import (
    UnforeseenLossError,
)


class LeastDivisors(NamedTuple):
    """The terms of a micro-batch that the step itself divides by 1, or by the least that was seen.

    Attributes:
        lone: those of which nothing tells what that is, see `LoneCounts`.
        counts: what the others count.
    """

    lone: frozenset[int]
    counts: dict[int, float]


def least_divisors(rules: LossRules, reading: Reading, told: Foretelling | None, part: Any) -> LeastDivisors:
    """The terms of a micro-batch whose divisor is a count, or keeps them from being divided by less: by zero, mostly.

    Whether a term is zero does not tell: that of a row beyond its margin is, and counts.
    """
    lone, counts = set[int](), dict[int, float]()
    for index, rule in enumerate(rules.rules if told is not None else ()):
        assert told is not None
        if rule.looks_up:
            if rule.law is Law.OWN or not told.is_constant(index):
                lone.add(index)
        elif rule.law is Law.MEAN and reading.is_divided(index):
            divisor, is_one = reading.divisors[index], reading.is_one(index)
            # What is added to every divisor keeps none; one near zero counts nothing, see `LossRules.counts`.
            is_own = not rule.excess and not 0 < abs(reading.quotients[index]) <= SMALL
            if not is_one and not (is_own and told.may_be_kept(index, abs(divisor))):
                continue
            count = told.count_of(index, part, divisor, is_one=is_one)
            if count is None:
                lone.add(index)
            else:
                counts[index] = count
    return LeastDivisors(frozenset(lone), counts)


def looked_at(rules: LossRules, reading: Reading, counts: Sequence[float]) -> tuple[float, ...]:
    """What micro-batches as one tell: what terms count, and what those are divided by that are looked up.

    Raises:
        UnforeseenLossError: the step's own number shows in the micro-batches and not in these as one, or otherwise.
    """
    for index, rule in enumerate(rules.rules):
        if reading.divisors[index] and rule.numbered != reading.is_divided(index):
            raise UnforeseenLossError("a divisor that shows in some micro-batches only")
    return tuple(
        reading.divisors[index] if rule.looks_up else count
        for index, (rule, count) in enumerate(zip(rules.rules, counts, strict=True))
    )


def main_mean(rules: LossRules, totals: Sequence[float]) -> int:
    """The mean by whose counts a term weighs that looks at no row: the first that counts something in the batch."""
    return next((index for index in rules.means if totals[index]), rules.means[0])


class BatchSums(NamedTuple):
    """What the micro-batches of a batch add up to (see `StepShares`).

    Args:
        counted: by term, what they counted.
        lone: where that is not to be trusted.
        fractions: of each mean.
        beside: means that a constant stands beside, below a learned factor.
        shared: of what looks at no row.
        unlike: their terms were scaled each by its own share.
    """

    counted: list[float]
    lone: list[float]
    fractions: list[float]
    beside: list[float]
    shared: float
    unlike: float

    def averaged(self, average: Callable[[Sequence[float]], list[float]]) -> "BatchSums":
        """That of all ranks, divided by their number, by one reduction."""
        size = len(self.counted)
        flat = average([*self.counted, *self.lone, *self.fractions, *self.beside, self.shared, self.unlike])
        columns = [flat[place * size : (place + 1) * size] for place in range(4)]
        return BatchSums(*columns, shared=flat[-2], unlike=flat[-1])

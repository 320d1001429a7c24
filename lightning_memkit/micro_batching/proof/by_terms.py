"""Compare the gradients of rows, run whole and in micro-batches, by the divisors of their loss's terms.

The "whole" is a trial of all rows, "parts" are the trials of their micro-batches.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from lightning_memkit.micro_batching import WeighBy, Weigher
from lightning_memkit.micro_batching.graph.loss_rules import LossRules
from lightning_memkit.micro_batching.graph.term_rules import Law, share_of
from lightning_memkit.micro_batching.graph.term_scales import scale_terms
from lightning_memkit.micro_batching.proof.comparison import (
    SCALE,
    Comparison,
    Miss,
)
from lightning_memkit.micro_batching.proof.row_runs import (
    ComparisonOutcome,
    RowRuns,
    TrialStep,
    several_count,
)
from lightning_memkit.micro_batching.ranks.agreement import any_rank
from lightning_memkit.micro_batching.shares.divisors import main_mean
from lightning_memkit.micro_batching.shares.step_shares import ADD_UP

_TERMS = 6  # how many terms of a loss, or groups of them, are compared one by one
COARSE = 1e-5  # the measured noise above which a mismatch of a small term could hide in a large one


class TermComparison:
    """Compares micro-batches with the whole by the rules of their loss's terms.

    Args:
        runs: runs the rows again, with some of their terms.
        ways: the candidate ways of weighing, which the outcome keeps.
        whole: the trial of all rows.
        parts: the trials of the micro-batches.
        comparison: compares with the whole's gradient.
    """

    def __init__(
        self,
        runs: RowRuns,
        ways: list[WeighBy | Weigher],
        whole: TrialStep,
        parts: list[TrialStep | None],
        comparison: Comparison,
    ) -> None:
        self._runs, self._ways, self._whole, self._parts = runs, ways, whole, parts
        self._comparison = comparison

    def compare(
        self,
        rules: LossRules,
        *,
        of_whole: bool = False,
    ) -> ComparisonOutcome | None:
        """Compare by the loss's terms; None if they don't add up as the rules say.

        With `of_whole`, totals are the whole's divisors instead of the sums of its micro-batches'.
        """
        whole, parts, comparison = self._whole, self._parts, self._comparison
        present = [
            (part, rows) for part, rows in zip(parts, self._runs.rows.sizes, strict=True) if part is not None
        ]
        rules = _shared_below_factors(rules, whole)
        mains, shares = _weights_of_parts(rules, present, whole, of_whole=of_whole)
        unlike = any(max(of_part) - min(of_part) > 1e-12 for of_part in shares)
        unlike = any_rank(self._runs.step.run, unlike)
        apart = all(
            rules.read(part.terms).scales_apart(own) for (part, _), own in zip(present, shares, strict=True)
        )
        if any_rank(self._runs.step.run, not apart):
            return None
        miss = Miss(excess=0.0, relative_error=0.0)
        if not unlike and not self._runs.meets:
            gradients = [part.gradient for part, _ in present]
            miss = self._runs.miss(comparison, gradients, [of_part[0] for of_part in shares])
        several = len(rules.rules) > 1
        has_sums = any(rule.law in (Law.SUM, Law.OWN) for rule in rules.rules)
        is_lone = has_sums and not several_count(parts)
        is_coarse = any_rank(self._runs.step.run, comparison.level > COARSE)
        if self._runs.meets or (several and (unlike or has_sums or is_coarse)):
            miss, rules, is_lone = self._term_by_term(
                rules, shares, mains if rules.means else _fractions(present), comparison
            )
            if miss.excess <= 1 and several:
                together = self._all_terms(rules, present, whole, comparison, of_whole=of_whole)
                miss = max(miss, together, key=lambda miss: miss.excess)
        if miss.excess > 1 and not several and not of_whole:
            return None  # a single term may be a mean over something that its graph does not show
        return ComparisonOutcome(
            miss=miss,
            ways=self._ways,
            rules=rules,
            whole=whole,
            parts=parts,
            shares=mains,
            comparison=comparison,
            is_lone=is_lone,
            unlike=unlike,
        )

    def _term_by_term(
        self,
        rules: LossRules,
        shares: Sequence[Sequence[float]],
        fractions: Sequence[float],
        of_all: Comparison,
    ) -> tuple[Miss, LossRules, bool]:
        """Compare each term by itself, so that none hides behind a larger one.

        Sums of one name (penalties on many parameters) are compared together. A sum that its micro-batches
        miss may depend on no row: then each micro-batch takes its fraction of it.

        Returns:
            The worst miss; the rules with the laws that held; whether a sum counts in one micro-batch only, so
            that it may be no sum.
        """
        worst, laws, is_lone = Miss(excess=0.0, relative_error=0.0), list(rules.rules), False
        ones = [1.0] * len(laws)
        groups = _groups(rules)
        while groups:
            group = groups.pop()
            alone = partial(_scaled_terms, rules, group, ones)
            as_one = self._runs.whole(alone)
            whole = as_one.gradient
            # Scale the whole loss, not the term: what a term's own scale does not reach would pass for noise.
            again = self._runs.whole(lambda loss, alone=alone: alone(loss) * SCALE).gradient
            comparison = Comparison(self._runs.spans(), whole, again / SCALE)
            runs = self._parts_of_terms(rules, group, shares)
            gradients = [run.gradient for run in runs]
            law = laws[group[0]].law
            miss = self._runs.miss(comparison, gradients, [1.0] * len(gradients), alone)
            if law is Law.SUM and miss.excess > 1:
                shared = self._runs.miss(comparison, gradients, fractions, alone)
                alike = all(_is_same_number(rules, index, as_one, runs) for index in group)
                if shared.excess <= 1 and not any_rank(self._runs.step.run, not alike):
                    miss, law = shared, Law.SHARED
                elif len(group) > 1:
                    groups += [[index] for index in group]
                    continue
            of_all.sums_up(whole)
            lone = law in (Law.SUM, Law.OWN) and any_rank(self._runs.step.run, not several_count(runs))
            if lone and laws[group[0]].divided:
                law = Law.MEAN  # its divisor of 1 seems to be a count that is zero in the other micro-batches
            for index in group:
                laws[index] = replace(laws[index], law=law)
            is_lone = is_lone or lone
            worst = max(worst, miss, key=lambda miss: miss.excess)
        return worst, LossRules(rules=tuple(laws)), is_lone

    def _all_terms(
        self,
        rules: LossRules,
        present: Sequence[tuple[TrialStep, int]],
        whole: TrialStep,
        comparison: Comparison,
        *,
        of_whole: bool,
    ) -> Miss:
        """The miss with all terms scaled at once, as in training: the scale of one may reach another."""
        _, scales = _weights_of_parts(rules, present, whole, of_whole=of_whole, by_rows=not rules.means)
        runs = self._parts_of_terms(rules, range(len(rules.rules)), scales)
        return self._runs.miss(comparison, [run.gradient for run in runs], [1.0] * len(runs))

    def _parts_of_terms(
        self, rules: LossRules, group: Sequence[int], shares: Sequence[Sequence[float]]
    ) -> list[TrialStep]:
        """Run the micro-batches with only some terms in their loss, each scaled by its share."""
        remaining = iter(shares)
        runs = [
            self._runs.part(index, lambda loss: _scaled_terms(rules, group, next(remaining), loss))
            for index in range(len(self._runs.rows.parts))
        ]
        return [run for run in runs if run is not None]


def _scaled_terms(rules: LossRules, group: Sequence[int], scales: Sequence[float], loss: Tensor) -> Tensor:
    """A loss whose backward sees only the terms in `group`, each scaled."""
    reading = rules.reading_of(loss)
    scale_terms(reading, [scale if index in group else 0.0 for index, scale in enumerate(scales)])
    return loss * 1


def _groups(rules: LossRules) -> list[list[int]]:
    """The groups of terms that are compared together: sums of one name; and means beyond the first `_TERMS`.

    Sums of different names stay apart: one may depend on no row, and another may count nothing in these rows.
    """
    groups: dict[Any, list[int]] = defaultdict(list)
    for index, rule in enumerate(rules.rules):
        alike = ("sums", rule.name) if rule.law is Law.SUM and not rule.divided else ("one", index)
        is_own = len(groups) < _TERMS or alike in groups or rule.law is not Law.MEAN
        groups[alike if is_own else rule.law].append(index)
    return list(groups.values())


def _shared_below_factors(rules: LossRules, whole: TrialStep) -> LossRules:
    """The rules, with sums that share a learned factor with a mean as `Law.SHARED`: they need one share."""
    shared = rules.read(whole.terms).shared_factors
    of_means = {factor for index in rules.means for factor in shared[index]}
    return LossRules(
        rules=tuple(
            replace(rule, law=Law.SHARED) if rule.law is Law.SUM and of_means & {*factors} else rule
            for rule, factors in zip(rules.rules, shared, strict=True)
        )
    )


def _is_same_number(rules: LossRules, index: int, whole: TrialStep, parts: Sequence[TrialStep]) -> bool:
    """Whether a term that seems to depend on no row has one value in all runs; True if values are unknown.

    Such a term is computed from the same weights by the same operators, so its value is equal to the bit.
    Gradients don't tell: that of `p.mean(0).square().sum()` over similar rows differs by a few per cent,
    which bfloat16 hides.
    """
    tops = [rules.read(run.terms).tops[index] for run in (whole, *parts)]
    shown = [
        [top.number.value(run.values) for top in of_run]
        for run, of_run in zip((whole, *parts), tops, strict=True)
    ]
    if any(value is None for of_run in shown for value in of_run):
        return True
    first, *others = [[float(value) for value in of_run if value is not None] for of_run in shown]
    return all(other == first for other in others)


def counts_of(rules: LossRules, run: TrialStep | None) -> tuple[float, ...]:
    """The counts of each term of a trial's loss."""
    assert run is not None
    return rules.counts(rules.read(run.terms), run.loss, run.values)


def _shares(
    rules: LossRules, part: TrialStep, whole: TrialStep, totals: Sequence[float], main: float
) -> list[float]:
    """A micro-batch's share of each term; looked-up divisors are the whole's."""
    shares = rules.shares(counts_of(rules, part), totals, main)
    own, divisors = rules.read(part.terms).divisors, rules.read(whole.terms).divisors
    for index in rules.looked_up:
        shares[index] = share_of(own[index], divisors[index])
    return shares


def _fractions(present: Sequence[tuple[TrialStep, int]]) -> list[float]:
    total = sum(rows for _, rows in present)
    return [rows / total for _, rows in present]


def _weights_of_parts(
    rules: LossRules,
    present: Sequence[tuple[TrialStep, int]],
    whole: TrialStep,
    *,
    of_whole: bool,
    by_rows: bool = False,
) -> tuple[list[float], list[list[float]]]:
    """The weight of each micro-batch, and its share of each term.

    Args:
        rules: how terms add up.
        present: the trials of the micro-batches that have a loss, and their numbers of rows.
        whole: the trial of all rows.
        of_whole: totals are the whole's divisors instead of the sums of its micro-batches'.
        by_rows: weigh terms that depend on no row by rows, even in a loss of sums only.
    """
    counts = [counts_of(rules, part) for part, _ in present]
    totals = [sum(values) for values in zip(*counts, strict=True)]
    if of_whole:
        totals = list(counts_of(rules, whole))
    if rules.means and not any(totals[index] for index in rules.means):
        firsts = [place == 0 for place in range(len(present))]
        return [float(first) for first in firsts], [rules.shares_of_nothing(is_first=one) for one in firsts]
    rows = _fractions(present)
    mains = [_main(rules, count, totals, row) for count, row in zip(counts, rows, strict=True)]
    if by_rows or (of_whole and abs(sum(mains) - 1) > ADD_UP):  # clamped divisors exceed their counts
        mains = rows
    return mains, [
        _shares(rules, part, whole, totals, main) for (part, _), main in zip(present, mains, strict=True)
    ]


def _main(rules: LossRules, counts: Sequence[float], totals: Sequence[float], rows: float) -> float:
    if not rules.means:
        return 1.0 if rules.summed else rows
    main = main_mean(rules, totals)
    return counts[main] / totals[main] if totals[main] else 0.0

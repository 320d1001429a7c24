"""How gradients of rows add up by what their loss's terms show that they divide by."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from lightning_memkit.micro_batching import WeighBy, Weigher
from lightning_memkit.micro_batching.graph.loss_rules import LossRules
from lightning_memkit.micro_batching.graph.loss_walk import terms_of
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

_TERMS = 6  # of a loss, or groups of them, that are compared one by one
COARSE = 1e-5  # measured noise from which on a small term could hide in a large one


class TermComparison:
    """Compares parts with their whole by the rules of their loss's terms.

    Args:
        runs: run the rows anew, with some of their terms.
        ways: of weighing that are possible, which an outcome names.
        whole: the run of all rows.
        parts: those of the parts.
        comparison: with the whole's gradient.
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
        """The comparison by what the loss shows; None where its terms don't add up as they seem to.

        `of_whole`: totals are what the whole is divided by, and not what its parts are: these rows are not to tell how
        divisors add up.
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
            return None  # a single term may be a mean of something that it does not show
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
        """The worst miss of terms that are compared by themselves, behind no larger one; and the laws that held.

        Sums of one name, as the penalties on each of many parameters are, go together. A sum that is not that of its
        parts' may be one that looks at no row, of which each part takes its fraction; one of which a part alone counts
        may be none, which is told last.
        """
        worst, laws, is_lone = Miss(excess=0.0, relative_error=0.0), list(rules.rules), False
        ones = [1.0] * len(laws)
        groups = _groups(rules)
        while groups:
            group = groups.pop()
            alone = partial(_scaled_terms, rules, group, ones)
            as_one = self._runs.whole(alone)
            whole = as_one.gradient
            # The whole loss is scaled: what a term's own scale does not reach would be taken for noise.
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
                law = Law.MEAN  # by a count, as it seems, of which the other parts have none
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
        """The miss of parts whose terms are all scaled at once, as in training: what scales one may reach another."""
        _, scales = _weights_of_parts(rules, present, whole, of_whole=of_whole, by_rows=not rules.means)
        runs = self._parts_of_terms(rules, range(len(rules.rules)), scales)
        return self._runs.miss(comparison, [run.gradient for run in runs], [1.0] * len(runs))

    def _parts_of_terms(
        self, rules: LossRules, group: Sequence[int], shares: Sequence[Sequence[float]]
    ) -> list[TrialStep]:
        """The runs of parts whose loss is some of its terms, each scaled by its share."""
        remaining = iter(shares)
        runs = [
            self._runs.part(index, lambda loss: _scaled_terms(rules, group, next(remaining), loss))
            for index in range(len(self._runs.rows.parts))
        ]
        return [run for run in runs if run is not None]


def _scaled_terms(rules: LossRules, group: Sequence[int], scales: Sequence[float], loss: Tensor) -> Tensor:
    """A loss whose backward sees some of its terms alone, each scaled."""
    reading = rules.read(terms_of(loss))
    scale_terms(reading, [scale if index in group else 0.0 for index, scale in enumerate(scales)])
    return loss * 1


def _groups(rules: LossRules) -> list[list[int]]:
    """Terms that are compared at once: sums of one name; and means, where there are many more.

    Sums of several names may be one that looks at no row, and one of which these rows hold nothing.
    """
    groups: dict[Any, list[int]] = defaultdict(list)
    for index, rule in enumerate(rules.rules):
        alike = ("sums", rule.name) if rule.law is Law.SUM and not rule.divided else ("one", index)
        is_own = len(groups) < _TERMS or alike in groups or rule.law is not Law.MEAN
        groups[alike if is_own else rule.law].append(index)
    return list(groups.values())


def _shared_below_factors(rules: LossRules, whole: TrialStep) -> LossRules:
    """The rules with sums beside means below one learned factor as what looks at no row: they have one share."""
    shared = rules.read(whole.terms).shared_factors
    of_means = {factor for index in rules.means for factor in shared[index]}
    return LossRules(
        rules=tuple(
            replace(rule, law=Law.SHARED) if rule.law is Law.SUM and of_means & {*factors} else rule
            for rule, factors in zip(rules.rules, shared, strict=True)
        )
    )


def _is_same_number(rules: LossRules, index: int, whole: TrialStep, parts: Sequence[TrialStep]) -> bool:
    """Whether a term that seems to look at no row has one value in the batch and its parts, where this is shown.

    It is computed from the same weights by the same operators, so to the bit. The gradient of
    `p.mean(0).square().sum()` over rows that are much alike is that of its parts but for a few per cent, which
    bfloat16 hides.
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
    """What each term of a run's loss counts."""
    assert run is not None
    return rules.counts(rules.read(run.terms), run.loss, run.values)


def _shares(
    rules: LossRules, part: TrialStep, whole: TrialStep, totals: Sequence[float], main: float
) -> list[float]:
    """What a part weighs in each term, beside the whole that it is of."""
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
    """What each part weighs, and what it weighs in each term.

    Args:
        rules: how terms add up.
        present: the parts, and their rows.
        whole: what they are parts of.
        of_whole: totals are what the whole is divided by, and not what its parts are.
        by_rows: what looks at no row goes by rows, also in a loss of sums.
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
    if by_rows or (of_whole and abs(sum(mains) - 1) > ADD_UP):  # kept divisors are more than what they count
        mains = rows
    return mains, [
        _shares(rules, part, whole, totals, main) for (part, _), main in zip(present, mains, strict=True)
    ]


def _main(rules: LossRules, counts: Sequence[float], totals: Sequence[float], rows: float) -> float:
    if not rules.means:
        return 1.0 if rules.summed else rows
    main = main_mean(rules, totals)
    return counts[main] / totals[main] if totals[main] else 0.0

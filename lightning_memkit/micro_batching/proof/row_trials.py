"""Some rows of a batch on trial, whole and in parts: how their gradients, and what their loss shows, add up."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching import WeighBy, Weigher, normalized, weigher
from lightning_memkit.micro_batching.changes.composed_state import ComposedState
from lightning_memkit.micro_batching.changes.step_changes import StepChange
from lightning_memkit.micro_batching.graph.learned_rules import (
    NOTHING_COUNTS,
    CurvedLoss,
    UnlikeDivisors,
    agreed,
    learned,
)
from lightning_memkit.micro_batching.graph.loss_rules import VARYING_FACTOR, Law, LossRules, share_of
from lightning_memkit.micro_batching.graph.loss_terms import LossTerms
from lightning_memkit.micro_batching.graph.loss_walk import terms_of
from lightning_memkit.micro_batching.graph.rests import Rest, RestRules
from lightning_memkit.micro_batching.graph.term_scales import scale_terms
from lightning_memkit.micro_batching.graph.term_values import rounding_of_terms, weighed_value
from lightning_memkit.micro_batching.parts.joining_rules import ROUNDED
from lightning_memkit.micro_batching.proof import verdicts
from lightning_memkit.micro_batching.proof.comparison import (
    SCALE,
    Comparison,
    Miss,
    last_bits_turned,
    spans_of,
)
from lightning_memkit.micro_batching.proof.decomposability import Verdict
from lightning_memkit.micro_batching.proof.trials import StepFailedError, Trials
from lightning_memkit.micro_batching.proof.without_noise import SharedDraws
from lightning_memkit.micro_batching.ranks.agreement import any_rank, largest_of_ranks, values_of_ranks
from lightning_memkit.micro_batching.run import Step
from lightning_memkit.micro_batching.shares.batch_counts import Foretelling
from lightning_memkit.micro_batching.shares.foreseen import UnforeseenLossError
from lightning_memkit.micro_batching.shares.step_shares import ADD_UP, main_mean

_TERMS = 6  # of a loss, or groups of them, that are compared one by one
# Batch statistics are warned about; a batch that is changed in place is handed out in copies.
_CHANGED_IN_PARTS = ("batch_statistics", "batch", "generator")
_COARSE = 1e-5  # measured noise from which on a small term could hide in a large one
_OK, _PASSED_OVER, _OUT_OF_MEMORY, _FAILED = range(4)  # how a trial ends on a rank, the worst last

T = TypeVar("T")


class NothingCountsError(Exception):
    """The rows have no gradient: of what does not count nothing is learned."""


@dataclass(kw_only=True)
class TrialStep:
    """One trial step: its gradient, and what its loss, its logs and its results were."""

    gradient: Tensor
    terms: LossTerms
    loss: Tensor
    logged: list[dict[str, Any]]
    returned: dict[str, Any]
    values: dict[tuple[Any, int], Tensor]
    left: dict[str, Any]

    @property
    def counts(self) -> bool:
        """Whether it has a gradient: not where all labels are ignored, or a mean is over nothing."""
        return bool(self.gradient.isfinite().all()) and bool(self.gradient.any())


@dataclass(kw_only=True)
class Rows:
    """Some rows of a batch, whole and in parts."""

    whole: Any
    parts: list[Any]
    sizes: list[int]


@dataclass(kw_only=True)
class Outcome:
    """What a comparison has come to.

    Attributes:
        miss: by how much the parts' gradients miss the whole's, of what rounding explains.
        ways: of weighing that remain possible.
        rules: how the loss's terms add up, where its graph shows it.
        parts: None for one that the module passes over.
        shares: what each part weighs; with `rules` of those that are not passed over.
        why: the graph's own word on why the loss does not split.
        bends: gradients are changed by what is not linear in them.
        is_lone: a sum of which one part alone counts: it may be a mean that is kept from zero.
        unlike: the loss's terms have unlike shares.
        kept: means whose parts' divisors are more than what they count: they foretell nothing.
        changes: what the step changes besides gradients.
        state: of these, what may be put together from parts.
    """

    miss: Miss
    ways: list[WeighBy | Weigher]
    rules: LossRules | None
    whole: TrialStep
    parts: list[TrialStep | None]
    shares: list[float]
    comparison: Comparison
    why: str = ""
    bends: bool = False
    is_lone: bool = False
    unlike: bool = False
    kept: frozenset[int] = frozenset()
    changes: Sequence[StepChange] = ()
    state: ComposedState | None = None

    @property
    def is_mixed(self) -> bool:
        """Whether several parts count: one alone tells little of what rows do to each other."""
        return not self.is_lone and _several(self.parts)

    @property
    def present(self) -> list[int]:
        """The parts that are not passed over."""
        return [index for index, part in enumerate(self.parts) if part is not None]

    @property
    def present_shares(self) -> list[float]:
        """What each of these weighs."""
        return self.shares if self.rules is not None else [self.shares[index] for index in self.present]


class RowTrials:
    """Runs rows whole and in parts, which leaves no trace, and compares.

    Args:
        step: whose rows they are.
        trials: run them.
        rows: to compare.
        draws: hands the whole's random numbers out to its parts; None where the step draws none that matter.
    """

    def __init__(self, step: Step, trials: Trials, rows: Rows, draws: SharedDraws | None) -> None:
        self._step, self._trials, self._rows, self._draws = step, trials, rows, draws
        self._is_exact = step.run.precision in ("32-true", "64-true")
        # Where ranks meet in every part, a gradient is that of all ranks' parts, each scaled before its backward.
        self._meets = trials.ranks.meets

    def compare(
        self, ways: list[WeighBy | Weigher], *, reads: bool, known: LossRules | None = None
    ) -> Outcome:
        """Compare gradients; by what the loss's terms show, else under each way of weighing.

        Args:
            ways: that are possible.
            reads: whether the loss's terms are to be read.
            known: rules that held before.

        Raises:
            NothingCountsError: the rows of a rank have no gradient, or one of their loss's terms counts none of them,
                or it shows less than is known.
        """
        self._trials.capture = None
        if self._draws is not None:
            self._draws.record()
        whole = self._run(self._rows.whole)
        if any_rank(self._step.run, not whole.counts):
            raise NothingCountsError
        changes = [c for c in self._trials.changes if not c.composes and c.kind not in _CHANGED_IN_PARTS]
        state = self._capture(changes, whole.loss.dtype)
        scaled = self._whole(lambda loss: loss * SCALE)
        whole.left, again = scaled.left, scaled.gradient / SCALE
        comparison = Comparison(self._spans(), whole.gradient, again)
        bends = self._bends(comparison)
        parts = [self._part(index) for index in range(len(self._rows.parts))]
        present = [part for part in parts if part is not None]
        rules, outcome, is_less = None, None, False
        if reads and present and not bends:
            looks = self._step.run.world_size == 1
            terms = [part.terms for part in present]
            rules = learned(whole.terms, terms, whole.loss.dtype, known=known, looks=looks)
            is_less = isinstance(rules, LossRules) and known is not None and rules.tells_less(known)
        if any_rank(self._step.run, rules == NOTHING_COUNTS):
            raise NothingCountsError
        if any_rank(self._step.run, is_less):
            return self._against(known, ways, whole, parts, comparison)
        rules = self._of_all_ranks(rules)
        if isinstance(rules, LossRules):
            outcome = self._by_rules(ways, rules, whole, parts, comparison)
            kept = self._kept(rules, outcome, whole, parts)
            if kept and self._step.run.world_size == 1:
                outcome = self._by_rules(ways, _looked_up(rules, kept), whole, parts, comparison) or outcome
            elif kept:
                outcome = self._by_whole(rules, kept, ways, whole, parts, comparison) or outcome
        if outcome is None:
            outcome = self._by_ways(ways, whole, parts, comparison)
            outcome.why = whole.terms.curved or self._why_not(rules, comparison)
            outcome.bends = bends
            if outcome.why or bends:  # a sample on which this does not show proves nothing
                outcome.miss = Miss(excess=float("inf"), relative_error=outcome.miss.relative_error)
        outcome.changes, outcome.state = changes, state
        return outcome

    def _against(
        self,
        known: LossRules | None,
        ways: list[WeighBy | Weigher],
        whole: TrialStep,
        parts: list[TrialStep | None],
        comparison: Comparison,
    ) -> Outcome:
        """The comparison by rules that other rows have told, where it fails: these rows may act on each other.

        Raises:
            NothingCountsError: it does not fail; these rows alone tell less than is known.
        """
        outcome = None
        with suppress(UnforeseenLossError):
            if known is not None:
                outcome = self._by_rules(ways, known, whole, parts, comparison, of_whole=True)
        if outcome is None or outcome.miss.excess <= 1:
            raise NothingCountsError
        return outcome

    def _kept(
        self, rules: LossRules, outcome: Outcome | None, whole: TrialStep, parts: list[TrialStep | None]
    ) -> list[int]:
        """The means of a comparison that fails whose divisors don't add up: some may be kept from being less."""
        if outcome is not None and outcome.miss.excess <= 1:
            return []
        counts = [_counts(rules, part) for part in parts if part is not None]
        totals = [sum(values) for values in zip(*counts, strict=True)]
        unlike = [share_of(total, own) != 1 for total, own in zip(totals, _counts(rules, whole), strict=True)]
        unlike = largest_of_ranks(self._step.run, [float(one) for one in unlike])
        return [index for index in rules.means if unlike[index]]

    def _by_whole(
        self,
        rules: LossRules,
        kept: Sequence[int],
        ways: list[WeighBy | Weigher],
        whole: TrialStep,
        parts: list[TrialStep | None],
        comparison: Comparison,
    ) -> Outcome | None:
        """The comparison by what the whole is divided by, where parts have kept divisors; None where it fails, too.

        On several ranks: what each counts of these is looked up in every batch (`LoneCounts`), from the first on.
        """
        outcome = self._by_rules(ways, rules, whole, parts, comparison, of_whole=True)
        if outcome is None or outcome.miss.excess > 1:
            return None
        outcome.kept = frozenset(kept)
        return outcome

    def noise_explains(self, outcome: Outcome) -> bool:
        """Whether parts may differ by their random numbers alone, which then are to be taken away or shared."""
        self._hand_out(None)
        other = self._together(partial(self._trials.gradient_of, self._step, self._rows.whole, seed=1))
        incomplete = self._draws is not None and not self._draws.complete
        return any_rank(self._step.run, incomplete or outcome.comparison.differs(other))

    def dependence(self, outcome: Outcome) -> Verdict | None:
        """None where the second part's gradient is the same after the first as alone, else what to say of it."""
        second = outcome.parts[1]
        if self._draws is not None:
            return None  # with numbers that are handed out, another step before would take them
        counts = (
            second is not None and outcome.parts[0] is not None and bool(second.gradient.isfinite().all())
        )
        if any_rank(self._step.run, not counts) or second is None:
            return None
        trials, parts = self._trials, self._rows.parts
        failure, error = "", 0.0
        trials.capture = None
        trials.between = None if outcome.state is None else outcome.state.begin_anew
        try:
            after = self._together(partial(trials.gradient_of, self._step, parts[1], after=parts[0]))
            noisy = second.gradient * (1 + outcome.comparison.level)
            miss = Comparison(self._spans(), second.gradient, noisy).miss([after], [1.0])
            error = miss.relative_error if miss.excess > 1 else 0.0
        except StepFailedError as failed:
            if failed.skipped or is_out_of_memory(failed.cause):
                raise
            error, failure = float("inf"), f" ({type(failed.cause).__name__}: {failed.cause})"
        error = largest_of_ranks(self._step.run, [error])[0]
        if error == 0:
            return None
        return verdicts.handed_on(
            [*trials.handed_on, *(change.name for change in outcome.changes)], error, failure
        )

    def learn_counts(self, foretold: Foretelling, outcome: Outcome, rules: LossRules) -> None:
        """Let numbers of the batch be compared with what each term counted in it and in its parts."""
        present = outcome.present
        counts = [_counts(rules, outcome.whole), *(_counts(rules, outcome.parts[index]) for index in present)]
        batches = [self._rows.whole, *(self._rows.parts[index] for index in present)]
        foretold.learn(
            batches,
            [
                [count[index] for count in counts] if index in {*rules.means} - outcome.kept else None
                for index in range(len(rules.rules))
            ],
            [(rule.name, rule.index, rule.branch) for rule in rules.rules],
        )

    def learn_rests(self, rests: RestRules, outcome: Outcome, noise: float) -> None:
        """Let rules of what has no gradient in the loss learn from a comparison by what the loss shows.

        Args:
            rests: the rules.
            outcome: of the comparison.
            noise: of a number that is computed from rows, relative.
        """
        rules = outcome.rules
        assert rules is not None
        sizes = [self._rows.sizes[index] for index in outcome.present]
        parts = [outcome.parts[index] for index in outcome.present]
        runs = [run for run in (outcome.whole, *parts) if run is not None]
        found = [_rest_of(rules, run, rows) for run, rows in zip(runs, [sum(sizes), *sizes], strict=True)]
        told = [rest for rest in found if rest is not None]
        if len(told) < len(runs):
            return
        readings = [rules.read(run.terms) for run in runs]
        rounding = max(
            rounding_of_terms(reading, run.values, run.loss)
            for reading, run in zip(readings, runs, strict=True)
        )
        rests.learn(rules, told[0], told[1:], rounding, max(noise, 1e-6))

    def _hand_out(self, part: int | None) -> None:
        """The next run gets the random numbers of a part's rows; of the whole, its own again."""
        if self._draws is not None:
            sizes = self._rows.sizes
            total = sum(sizes)
            first = 0 if part is None else sum(sizes[:part])
            self._draws.hand_out(first, total if part is None else sizes[part], total)

    def _together(self, run: Callable[[], T]) -> T:
        """What ranks try at the same time; a failure on one is one on all, so that none waits for the others.

        Raises:
            NothingCountsError: another rank's module passes over its rows.
            StepFailedError: the step failed here or on another rank.
        """
        if self._meets or self._step.run.world_size == 1:
            return run()
        failure, results = None, []
        try:
            results.append(run())
        except Exception as error:
            failure = error
        try:
            worst = int(largest_of_ranks(self._step.run, [_ending(failure)])[0])
            if failure is not None and _ending(failure) == worst:
                raise failure
        finally:
            del failure  # its traceback, and with it this frame, holds the failed step's tensors
        if worst == _PASSED_OVER:
            raise NothingCountsError
        if worst == _OUT_OF_MEMORY:
            cause = torch.OutOfMemoryError("Another rank ran out of memory in a trial.")
            raise StepFailedError(cause, skipped=False)
        if worst == _FAILED:
            raise StepFailedError(RuntimeError("The step raised on another rank in a trial."), skipped=False)
        return results[0]

    def _run(self, batch: Any, change: Callable[[Tensor], Tensor] | None = None) -> TrialStep:
        return self._together(partial(self._run_here, batch, change))

    def _run_here(self, batch: Any, change: Callable[[Tensor], Tensor] | None) -> TrialStep:
        seen: list[tuple[Tensor, LossTerms]] = []

        def look(loss: Tensor) -> Tensor:
            seen.append((loss.detach(), terms_of(loss)))
            return loss if change is None else change(loss)

        trials = self._trials
        gradient = trials.gradient_of(self._step, batch, look=look)
        loss, terms = seen[0]
        return TrialStep(
            gradient=gradient,
            terms=terms,
            loss=loss,
            logged=trials.logged,
            returned=trials.returned,
            values=trials.values,
            left=trials.captured or {},
        )

    def _whole(self, change: Callable[[Tensor], Tensor] | None = None) -> TrialStep:
        """The whole's run once more, with the same random numbers."""
        self._hand_out(None)
        return self._run(self._rows.whole, change)

    def _part(self, index: int, change: Callable[[Tensor], Tensor] | None = None) -> TrialStep | None:
        """A part's run; None where the module passes over it, though it has a loss of the whole."""

        def run() -> TrialStep | None:
            try:
                return self._run_here(self._rows.parts[index], change)
            except StepFailedError as error:
                if not error.skipped:
                    raise
                return None

        self._hand_out(index)
        return self._together(run)

    def _spans(self) -> Any:
        return spans_of(self._step.run.module)

    def _of_all_ranks(self, rules: LossRules | str | None) -> LossRules | str | None:
        """The rules, where the loss has shown the same terms on every rank; else why it has none on one."""
        if self._step.run.world_size == 1:
            return rules
        told: list[LossRules | str | None] = values_of_ranks(self._step.run, rules)
        for one in told:
            if one == VARYING_FACTOR or isinstance(one, CurvedLoss | UnlikeDivisors):
                return one
        return agreed(rules, told)

    def _why_not(self, rules: LossRules | str | None, comparison: Comparison) -> str:
        """What the loss's graph says against a split, where the comparison of gradients may not show it."""
        if isinstance(rules, CurvedLoss) or (isinstance(rules, str) and rules == VARYING_FACTOR):
            return rules
        # In few bits a small term is no more than the rounding of the large ones.
        if isinstance(rules, UnlikeDivisors) and any_rank(self._step.run, comparison.level > _COARSE):
            return rules
        return ""

    def _miss(
        self,
        comparison: Comparison,
        gradients: Sequence[Tensor],
        weights: Sequence[float],
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> Miss:
        """By how much the parts' gradients miss the whole's, on the rank on which they do most.

        Where they do, the whole runs once more with weights that are rounded otherwise: forwards of other shapes round
        otherwise, too, and a deep net may make much of that.

        Args:
            comparison: with the whole's gradient.
            gradients: of the parts.
            weights: what each weighs.
            change: what the whole's loss was, of the step's.
        """
        miss = self._largest(comparison.miss(gradients, weights))
        if miss.excess > 1 and self._is_exact and not comparison.knows_rounding:
            with last_bits_turned(self._step.run.module):
                comparison.allow(self._whole(change).gradient)
            miss = self._largest(comparison.miss(gradients, weights))
        return miss

    def _largest(self, miss: Miss) -> Miss:
        return replace(miss, excess=largest_of_ranks(self._step.run, [miss.excess])[0])

    def _capture(self, changes: Sequence[StepChange], dtype: torch.dtype) -> ComposedState | None:
        """Let the further runs tell what they leave in the attributes and lists that the step changes."""
        names = [c.name for c in changes if c.kind in ("attribute", "container")]
        if not names:
            return None
        rounding = max(ROUNDED if self._is_exact else 2e-2, 10 * torch.finfo(dtype).eps)
        state = ComposedState(self._step.run.module, names, rounding)
        state.begin()
        self._trials.capture = state.left
        return state

    def _bends(self, comparison: Comparison) -> bool:
        """Whether gradients are no multiple of the loss's: what changes them would see those of a micro-batch.

        Half of a loss has half of its gradients to the bit. Where it has not, another run tells what kernels do in
        another order each time.
        """
        run = self._step.run
        if run.precision.startswith("16"):
            return False  # small gradients are rounded to fewer bits
        halved = self._whole(lambda loss: loss * 0.5).gradient * 2
        if not any_rank(run, comparison.bends(halved)):
            return False
        return any_rank(run, comparison.bends(halved, self._whole().gradient))

    def _by_rules(
        self,
        ways: list[WeighBy | Weigher],
        rules: LossRules,
        whole: TrialStep,
        parts: list[TrialStep | None],
        comparison: Comparison,
        *,
        of_whole: bool = False,
    ) -> Outcome | None:
        """The comparison by what the loss shows; None where its terms don't add up as they seem to.

        `of_whole`: totals are what the whole is divided by, and not what its parts are: these rows are not to tell how
        divisors add up.
        """
        present = [
            (part, rows) for part, rows in zip(parts, self._rows.sizes, strict=True) if part is not None
        ]
        rules = _shared_below_factors(rules, whole)
        mains, shares = _weights_of_parts(rules, present, whole, of_whole=of_whole)
        unlike = any(max(of_part) - min(of_part) > 1e-12 for of_part in shares)
        unlike = any_rank(self._step.run, unlike)
        apart = all(
            rules.read(part.terms).scales_apart(own) for (part, _), own in zip(present, shares, strict=True)
        )
        if any_rank(self._step.run, not apart):
            return None
        miss = Miss(excess=0.0, relative_error=0.0)
        if not unlike and not self._meets:
            gradients = [part.gradient for part, _ in present]
            miss = self._miss(comparison, gradients, [of_part[0] for of_part in shares])
        several = len(rules.rules) > 1
        has_sums = any(rule.law in (Law.SUM, Law.OWN) for rule in rules.rules)
        is_lone = has_sums and not _several(parts)
        is_coarse = any_rank(self._step.run, comparison.level > _COARSE)
        if self._meets or (several and (unlike or has_sums or is_coarse)):
            miss, rules, is_lone = self._term_by_term(
                rules, shares, mains if rules.means else _fractions(present), comparison
            )
            if miss.excess <= 1 and several:
                together = self._all_terms(rules, present, whole, comparison, of_whole=of_whole)
                miss = max(miss, together, key=lambda miss: miss.excess)
        if miss.excess > 1 and not several and not of_whole:
            return None  # a single term may be a mean of something that it does not show
        return Outcome(
            miss=miss,
            ways=ways,
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
            as_one = self._whole(alone)
            whole = as_one.gradient
            # The whole loss is scaled: what a term's own scale does not reach would be taken for noise.
            again = self._whole(lambda loss, alone=alone: alone(loss) * SCALE).gradient
            comparison = Comparison(self._spans(), whole, again / SCALE)
            runs = self._parts_of_terms(rules, group, shares)
            gradients = [run.gradient for run in runs]
            law = laws[group[0]].law
            miss = self._miss(comparison, gradients, [1.0] * len(gradients), alone)
            if law is Law.SUM and miss.excess > 1:
                shared = self._miss(comparison, gradients, fractions, alone)
                alike = all(_is_same_number(rules, index, as_one, runs) for index in group)
                if shared.excess <= 1 and not any_rank(self._step.run, not alike):
                    miss, law = shared, Law.SHARED
                elif len(group) > 1:
                    groups += [[index] for index in group]
                    continue
            of_all.sums_up(whole)
            lone = law in (Law.SUM, Law.OWN) and any_rank(self._step.run, not _several(runs))
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
        return self._miss(comparison, [run.gradient for run in runs], [1.0] * len(runs))

    def _parts_of_terms(
        self, rules: LossRules, group: Sequence[int], shares: Sequence[Sequence[float]]
    ) -> list[TrialStep]:
        """The runs of parts whose loss is some of its terms, each scaled by its share."""
        remaining = iter(shares)
        runs = [
            self._part(index, lambda loss: _scaled_terms(rules, group, next(remaining), loss))
            for index in range(len(self._rows.parts))
        ]
        return [run for run in runs if run is not None]

    def _by_ways(
        self,
        ways: list[WeighBy | Weigher],
        whole: TrialStep,
        parts: list[TrialStep | None],
        comparison: Comparison,
    ) -> Outcome:
        """The comparison under each way of weighing.

        Raises:
            NothingCountsError: where ranks meet in every part, and one counts nothing.
        """
        gradients = [torch.zeros_like(whole.gradient) if part is None else part.gradient for part in parts]
        if self._meets:
            misses = [self._miss(comparison, self._scaled_parts(way), [1.0] * len(parts)) for way in ways]
        else:
            misses = [self._miss(comparison, gradients, self._weights(way)) for way in ways]
        least = min(miss.excess for miss in misses)
        # A clear lead only: ways that differ by rounding stay open, in their order.
        kept = [index for index, miss in enumerate(misses) if miss.excess <= max(3 * least, 0.05)]
        count = weigher(ways[kept[0]], self._rows.whole)
        return Outcome(
            miss=misses[kept[0]],
            ways=[ways[index] for index in kept],
            rules=None,
            whole=whole,
            parts=parts,
            shares=[float(count(part)) for part in self._rows.parts],
            comparison=comparison,
        )

    def _scaled_parts(self, way: WeighBy | Weigher) -> list[Tensor]:
        """The gradients of parts whose loss each rank has weighed by itself."""
        weights = self._weights(way)
        if any_rank(self._step.run, not all(weights)):  # 0 times a mean over nothing is nan
            raise NothingCountsError
        runs = [
            self._part(index, lambda loss, weight=weight: loss * weight)
            for index, weight in enumerate(weights)
        ]
        return [run.gradient for run in runs if run is not None]

    def _weights(self, way: WeighBy | Weigher) -> list[float]:
        count = weigher(way, self._rows.whole)
        return normalized([float(count(part)) for part in self._rows.parts], summed=way == "sum")


def _ending(failure: Exception | None) -> int:
    """How a trial has ended on this rank."""
    if failure is None:
        return _OK
    if not isinstance(failure, StepFailedError):
        return _FAILED
    return _PASSED_OVER if failure.skipped else _OUT_OF_MEMORY if is_out_of_memory(failure.cause) else _FAILED


def _scaled_terms(rules: LossRules, group: Sequence[int], scales: Sequence[float], loss: Tensor) -> Tensor:
    """A loss whose backward sees some of its terms alone, each scaled."""
    reading = rules.read(terms_of(loss))
    scale_terms(reading, [scale if index in group else 0.0 for index, scale in enumerate(scales)])
    return loss * 1


def _looked_up(rules: LossRules, kept: Sequence[int]) -> LossRules:
    """The rules with some means as terms whose divisor is looked up in the whole batch, until rows tell more."""
    return LossRules(
        rules=tuple(
            replace(rule, law=Law.SUM, numbered=True) if index in kept else rule
            for index, rule in enumerate(rules.rules)
        )
    )


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


def _several(parts: Sequence[TrialStep | None]) -> bool:
    return sum(part is not None and part.counts for part in parts) > 1


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


def _counts(rules: LossRules, run: TrialStep | None) -> tuple[float, ...]:
    assert run is not None
    return rules.counts(rules.read(run.terms), run.loss, run.values)


def _rest_of(rules: LossRules, run: TrialStep, rows: int) -> Rest | None:
    reading = rules.read(run.terms)
    counts = _counts(rules, run)
    found = weighed_value(run.loss, reading, [1.0] * len(counts), run.values)
    return None if found is None or found[1] is None else Rest(pieces=found[1], counts=counts, rows=rows)


def _shares(
    rules: LossRules, part: TrialStep, whole: TrialStep, totals: Sequence[float], main: float
) -> list[float]:
    """What a part weighs in each term, beside the whole that it is of."""
    shares = rules.shares(_counts(rules, part), totals, main)
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
    counts = [_counts(rules, part) for part, _ in present]
    totals = [sum(values) for values in zip(*counts, strict=True)]
    if of_whole:
        totals = list(_counts(rules, whole))
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

"""Compare some rows of a batch, run whole and in micro-batches: do gradients and the loss's terms add up?"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching import WeighBy, Weigher, normalized, weigher
from lightning_memkit.micro_batching.changes.composed_state import ComposedState
from lightning_memkit.micro_batching.changes.step_changes import StepChange
from lightning_memkit.micro_batching.graph.learned_rules import (
    CurvedLoss,
    UnlikeDivisors,
)
from lightning_memkit.micro_batching.graph.loss_rules import VARYING_FACTOR, LossRules
from lightning_memkit.micro_batching.parts.joining_rules import ROUNDED
from lightning_memkit.micro_batching.proof import verdicts
from lightning_memkit.micro_batching.proof.by_terms import COARSE, TermComparison
from lightning_memkit.micro_batching.proof.comparison import SCALE, Comparison, Miss
from lightning_memkit.micro_batching.proof.decomposability import Verdict
from lightning_memkit.micro_batching.proof.judged import UNREPEATED, draws_unequally, may_be_unrepeatable
from lightning_memkit.micro_batching.proof.row_rules import RowRules
from lightning_memkit.micro_batching.proof.row_runs import (
    ComparisonOutcome,
    NotFiniteError,
    NothingCountsError,
    RowRuns,
    TrialStep,
)
from lightning_memkit.micro_batching.proof.trial_values import StepFailedError
from lightning_memkit.micro_batching.ranks.agreement import any_rank, largest_of_ranks
from lightning_memkit.utilities.garbage import put_aside
from lightning_memkit.utilities.generators import another_seed

# Changes that don't prevent a split: batch statistics cause a warning; a batch that the step changes in place
# is handed out in copies.
_CHANGED_IN_PARTS = ("batch_statistics", "batch", "generator")
_OTHER_SEEDS = 6  # a dropout of few numbers draws the same mask now and then


class RowTrials:
    """Compares rows run whole and in micro-batches.

    Args:
        runs: runs them without a trace.
    """

    def __init__(self, runs: RowRuns) -> None:
        self._runs = runs

    def compare(
        self, ways: list[WeighBy | Weigher], *, reads: bool, known: LossRules | None = None
    ) -> ComparisonOutcome:
        """Compare gradients by the divisors of the loss's terms, or else under each way of weighing.

        Args:
            ways: the candidate ways of weighing.
            reads: whether to read the loss's terms.
            known: rules that held before.

        Raises:
            NotFiniteError: on a rank, the rows' gradient is not finite.
            NothingCountsError: on a rank, no row has a gradient, or counts in a term; or they show less than is known.
        """
        put_aside()  # nodes of the runs' graphs are in cycles, which hold tensors
        self._runs.trials.capture = None
        if self._runs.draws is not None:
            self._runs.draws.record()
        whole = self._runs.run(self._runs.rows.whole)
        if any_rank(self._runs.step.run, not bool(whole.gradient.isfinite().all())):
            raise NotFiniteError
        if any_rank(self._runs.step.run, not whole.counts):
            raise NothingCountsError
        changes = _not_composing(whole)
        # Of lists that gain all rows in order, the number of items is the whole batch's, too: a step may count them.
        lists = [c for c in whole.changes if c.composes and c.kind == "container"]
        state = self._capture([*changes, *lists], whole.loss.dtype)
        scaled = self._runs.whole(lambda loss: loss * SCALE)
        whole.left, again = scaled.left, scaled.gradient / SCALE
        comparison = Comparison(self._runs.spans(), whole.gradient, again)
        bends = not self._runs.rows.is_further and self._bends(comparison)
        parts = [self._runs.part(index) for index in range(len(self._runs.rows.parts))]
        present = [part for part in parts if part is not None]
        terms = TermComparison(self._runs, ways, whole, parts, comparison)
        rules, outcome = None, None
        if any_rank(self._runs.step.run, bool(reads and present and not bends)):
            of_rows = RowRules(self._runs.step.run, terms, whole, parts, known)
            rules, outcome = of_rows.compare()
            if outcome is not None and of_rows.is_less:
                return outcome
        if outcome is None:
            outcome = self._by_ways(ways, whole, parts, comparison)
            outcome.why = whole.terms.curved or self._why_not(rules, comparison)
            outcome.bends = bends
            if outcome.why or bends:  # gradients that agree on these few rows would prove nothing
                outcome.miss = Miss(excess=float("inf"), relative_error=outcome.miss.relative_error)
        # What a micro-batch changes and the whole does not: by an event that is one of few rows only.
        told = {c.name for c in whole.changes}
        further = [c for part in present for c in _not_composing(part) if c.name not in told]
        outcome.changes, outcome.state = list(dict.fromkeys([*changes, *further])), state
        self._judge_draws(outcome)
        return outcome

    def _judge_draws(self, outcome: ComparisonOutcome) -> None:
        """Let the comparison fail if its draws can't be the same in the whole and in its micro-batches."""
        run, is_exact = self._runs.step.run, self._runs.is_exact
        is_random = draws_unequally(outcome)
        if any_rank(run, may_be_unrepeatable(outcome, is_exact=is_exact)):
            first, again = outcome.whole.gradient, self._runs.whole().gradient
            is_random = is_random or bool((again - first).norm() > UNREPEATED * first.norm())
        if any_rank(run, is_random):
            outcome.is_random = True
            outcome.miss = Miss(excess=float("inf"), relative_error=outcome.miss.relative_error)
        elif any_rank(run, outcome.whole.drawn is not None):
            self._runs.trials.draws.proven = True

    def noise_explains(self, outcome: ComparisonOutcome) -> bool:
        """Whether random numbers alone may explain a difference, so that noise must be removed or shared."""
        if outcome.is_random:
            return True
        runs = self._runs
        for further in range(_OTHER_SEEDS):
            runs.hand_out(None)
            of_rows = partial(runs.trials.gradient_of, runs.step, runs.rows.whole)
            other = runs.together(partial(of_rows, seed=(another_seed() + further) % 2**32))
            incomplete = runs.draws is not None and not runs.draws.complete
            if any_rank(runs.step.run, incomplete or outcome.comparison.differs(other)):
                return True
        return False

    def dependence(self, outcome: ComparisonOutcome) -> Verdict | None:
        """The verdict if the second micro-batch's gradient depends on the first having run; else None."""
        second = outcome.parts[1]
        if self._runs.rows.is_further or self._runs.draws is not None:
            return None  # with draws, the step before would use up the random numbers that are handed out
        counts = (
            second is not None and outcome.parts[0] is not None and bool(second.gradient.isfinite().all())
        )
        if any_rank(self._runs.step.run, not counts) or second is None:
            return None
        trials, parts = self._runs.trials, self._runs.rows.parts
        failure, error = "", 0.0
        trials.capture = None
        trials.between = None if outcome.state is None else outcome.state.begin_anew
        try:
            after = self._runs.together(
                partial(trials.gradient_of, self._runs.step, parts[1], after=parts[0])
            )
            noisy = second.gradient * (1 + outcome.comparison.level)
            miss = Comparison(self._runs.spans(), second.gradient, noisy).miss([after], [1.0])
            error = miss.relative_error if miss.excess > 1 else 0.0
        except StepFailedError as failed:
            if failed.skipped or is_out_of_memory(failed.cause):
                raise
            error, failure = float("inf"), f" ({type(failed.cause).__name__}: {failed.cause})"
        error = largest_of_ranks(self._runs.step.run, [error])[0]
        if error == 0:
            return None
        return verdicts.handed_on(
            [*trials.handed_on, *(change.name for change in outcome.changes)], error, failure
        )

    def _why_not(self, rules: LossRules | str | None, comparison: Comparison) -> str:
        """The reason in the loss's graph against a split, if gradients may not show it; else empty."""
        if isinstance(rules, CurvedLoss) or (isinstance(rules, str) and rules == VARYING_FACTOR):
            return rules
        # At low precision, a small term may be below the rounding of the large ones.
        if isinstance(rules, UnlikeDivisors) and any_rank(self._runs.step.run, comparison.level > COARSE):
            return rules
        return ""

    def _capture(self, changes: Sequence[StepChange], dtype: torch.dtype) -> ComposedState | None:
        """Let further runs record what they leave in the attributes and lists that the step changes."""
        names = [c.name for c in changes if c.kind in ("attribute", "container")]
        if not names:
            return None
        rounding = max(ROUNDED if self._runs.is_exact else 2e-2, 10 * torch.finfo(dtype).eps)
        state = ComposedState(self._runs.step.run.module, names, rounding)
        state.begin()
        self._runs.trials.capture = state.left
        return state

    def _bends(self, comparison: Comparison) -> bool:
        """Whether gradients are not linear in the loss, because a hook clips them, say.

        Half of a loss has exactly half of its gradients. If it has not, another run of the whole loss shows
        how much is due to kernels that add in another order each time.
        """
        run = self._runs.step.run
        if self._runs.trials.complete.incomplete:
            return True
        if run.precision.startswith("16"):
            return False  # in float16, half of a small gradient has fewer bits
        halved = self._runs.whole(lambda loss: loss * 0.5).gradient * 2
        if not any_rank(run, comparison.bends(halved)):
            return False
        return any_rank(run, comparison.bends(halved, self._runs.whole().gradient))

    def _by_ways(
        self,
        ways: list[WeighBy | Weigher],
        whole: TrialStep,
        parts: list[TrialStep | None],
        comparison: Comparison,
    ) -> ComparisonOutcome:
        """Compare under each way of weighing.

        Raises:
            NothingCountsError: ranks communicate in every micro-batch, and one of weight 0 is among them.
        """
        gradients = [torch.zeros_like(whole.gradient) if part is None else part.gradient for part in parts]
        if self._runs.meets:
            misses = [
                self._runs.miss(comparison, self._scaled_parts(way), [1.0] * len(parts)) for way in ways
            ]
        else:
            misses = [self._runs.miss(comparison, gradients, self._weights(way)) for way in ways]
        least = min(miss.excess for miss in misses)
        # Drop a way only if another is clearly better; ways that differ by rounding stay, in order.
        kept = [index for index, miss in enumerate(misses) if miss.excess <= max(3 * least, 0.05)]
        count = weigher(ways[kept[0]], self._runs.rows.whole)
        return ComparisonOutcome(
            miss=misses[kept[0]],
            ways=[ways[index] for index in kept],
            rules=None,
            whole=whole,
            parts=parts,
            shares=[float(count(part)) for part in self._runs.rows.parts],
            comparison=comparison,
        )

    def _scaled_parts(self, way: WeighBy | Weigher) -> list[Tensor]:
        """The gradients of micro-batches whose losses are weighed on each rank before the backward."""
        weights = self._weights(way)
        if any_rank(self._runs.step.run, not all(weights)):  # 0 times a mean over nothing is nan
            raise NothingCountsError
        runs = [
            self._runs.part(index, lambda loss, weight=weight: loss * weight)
            for index, weight in enumerate(weights)
        ]
        return [run.gradient for run in runs if run is not None]

    def _weights(self, way: WeighBy | Weigher) -> list[float]:
        count = weigher(way, self._runs.rows.whole)
        return normalized([float(count(part)) for part in self._runs.rows.parts], summed=way == "sum")


def _not_composing(run: TrialStep) -> list[StepChange]:
    return [c for c in run.changes if not c.composes and c.kind not in _CHANGED_IN_PARTS]

"""Trials of some rows of a batch, whole and in micro-batches ("parts"), on all ranks at the same time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching import WeighBy, Weigher
from lightning_memkit.micro_batching.changes.composed_state import ComposedState
from lightning_memkit.micro_batching.changes.step_changes import StepChange
from lightning_memkit.micro_batching.graph.columns import terms_and_columns_of
from lightning_memkit.micro_batching.graph.loss_head import Edges, head_of
from lightning_memkit.micro_batching.graph.loss_rules import LossRules
from lightning_memkit.micro_batching.graph.loss_terms import LossTerms
from lightning_memkit.micro_batching.proof.comparison import (
    Comparison,
    Miss,
    last_bits_turned,
    spans_of,
)
from lightning_memkit.micro_batching.proof.trial_values import StepFailedError
from lightning_memkit.micro_batching.proof.trials import Trials
from lightning_memkit.micro_batching.proof.without_noise import SharedDraws
from lightning_memkit.micro_batching.ranks.agreement import largest_of_ranks
from lightning_memkit.micro_batching.run import Step
from lightning_memkit.utilities.generators import Generators

_OK, _PASSED_OVER, _OUT_OF_MEMORY, _FAILED = range(4)  # outcomes of a trial on a rank, the worst last

T = TypeVar("T")


class NothingCountsError(Exception):
    """The rows have no gradient, so that nothing can be learned from them."""


class UntoldTermError(NothingCountsError):
    """The rows' loss has a term that no rows have shown before, and they don't tell how it adds up."""


class NotFiniteError(NothingCountsError):
    """The rows' gradient is not finite: scaled too far, or the run has diverged. Nothing can be compared with it."""


@dataclass(kw_only=True)
class TrialStep:
    """The results of one trial step: gradient, loss, logs, returned values, and the state that it left.

    `changes` is what it changed besides gradients.
    `drawn` is the state of Python's and NumPy's generators after it; None if it drew nothing from them.
    """

    gradient: Tensor
    terms: LossTerms
    loss: Tensor
    head: Edges
    drew: bool  # numbers of torch's generators
    logged: list[dict[str, Any]]
    returned: dict[str, Any]
    values: dict[tuple[Any, int], Tensor]
    left: dict[str, Any]
    changes: tuple[StepChange, ...] = ()
    drawn: Any = None

    @property
    def counts(self) -> bool:
        """Whether it has a gradient; False if all labels are ignored, or a mean is over nothing."""
        return bool(self.gradient.isfinite().all()) and bool(self.gradient.any())


@dataclass(kw_only=True)
class Rows:
    """Some rows of a batch, whole and split into micro-batches (`parts`) of `sizes` rows.

    `is_further`: others of the batch were compared before, and have shown what does not depend on the rows: whether
    gradients are linear in the loss, and whether a micro-batch depends on the one before.
    """

    whole: Any
    parts: list[Any]
    sizes: list[int]
    is_further: bool = False


@dataclass(kw_only=True)
class ComparisonOutcome:
    """The result of a comparison.

    Attributes:
        miss: by how much the micro-batches' gradients miss the whole's, relative to what rounding explains.
        ways: the ways of weighing that remain possible.
        rules: how the loss's terms add up; None if its graph does not show it.
        whole: the trial of all rows.
        parts: the trials of the micro-batches; None for one on which the step returned None.
        shares: the weight of each micro-batch; with `rules`, only of those that have a loss.
        comparison: compares with the whole's gradient.
        why: the reason in the graph why the loss can't be split; empty without one.
        bends: gradients are changed in a way that is not linear in them.
        is_lone: a sum counts in one micro-batch only, so that it may be a mean with a clamped divisor.
        unlike: the loss's terms have different shares.
        kept: means with clamped divisors in micro-batches; they predict nothing.
        changes: what the step changes besides gradients.
        state: those of the changes that may be composed from micro-batches.
        is_random: numbers are drawn that can't be the same in the whole and in its micro-batches.
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
    is_random: bool = False

    @property
    def is_mixed(self) -> bool:
        """Whether several micro-batches count; one alone tells little about how rows act on each other."""
        return not self.is_lone and several_count(self.parts)

    @property
    def present(self) -> list[int]:
        """The indices of the micro-batches that have a loss."""
        return [index for index, part in enumerate(self.parts) if part is not None]

    @property
    def present_shares(self) -> list[float]:
        """The weights of the micro-batches in `present`."""
        return self.shares if self.rules is not None else [self.shares[index] for index in self.present]


class RowRuns:
    """Runs trials of rows, whole and in micro-batches.

    Args:
        step: the current step.
        trials: runs them without a trace.
        rows: the rows.
        draws: gives the whole's random numbers to its micro-batches; None if that is not needed.
    """

    def __init__(self, step: Step, trials: Trials, rows: Rows, draws: SharedDraws | None) -> None:
        self.step, self.trials, self.rows, self.draws = step, trials, rows, draws
        self.is_exact = step.run.precision in ("32-true", "64-true")
        # If ranks communicate in every micro-batch, gradients are all ranks': scale them before the backward.
        self.meets = trials.ranks.meets

    def hand_out(self, part: int | None) -> None:
        """Let the next run get the random numbers of a micro-batch's rows, or with None those of all rows."""
        if self.draws is not None:
            sizes = self.rows.sizes
            total = sum(sizes)
            first = 0 if part is None else sum(sizes[:part])
            self.draws.hand_out(first, total if part is None else sizes[part], total)

    def together(self, run: Callable[[], T]) -> T:
        """Call `run` on all ranks; a failure on one is raised on all, so that none waits for the others.

        Raises:
            NothingCountsError: on another rank the step returned None.
            StepFailedError: the step failed here or on another rank.
        """
        if self.meets or self.step.run.world_size == 1:
            return run()
        failure, results = None, []
        try:
            results.append(run())
        except Exception as error:
            failure = error
        try:
            worst = int(largest_of_ranks(self.step.run, [_ending(failure)])[0])
            if failure is not None and _ending(failure) == worst:
                raise failure
        finally:
            # Its traceback refers to this frame: the cycle would keep the failed step's tensors alive.
            del failure
        if worst == _PASSED_OVER:
            raise NothingCountsError
        if worst == _OUT_OF_MEMORY:
            cause = torch.OutOfMemoryError("Another rank ran out of memory in a trial.")
            raise StepFailedError(cause, skipped=False)
        if worst == _FAILED:
            raise StepFailedError(RuntimeError("The step raised on another rank in a trial."), skipped=False)
        return results[0]

    def run(self, batch: Any, change: Callable[[Tensor], Tensor] | None = None) -> TrialStep:
        """A trial step on some rows, on all ranks; `change` maps its loss to what is differentiated."""
        return self.together(partial(self._run_here, batch, change))

    def _run_here(self, batch: Any, change: Callable[[Tensor], Tensor] | None) -> TrialStep:
        seen: list[tuple[Tensor, LossTerms, Edges, bool]] = []
        before = Generators(self.trials.draws.of_torch)

        def look(loss: Tensor) -> Tensor:
            seen.append((loss.detach(), terms_and_columns_of(loss), head_of(loss), before.drawn_from()[0]))
            return loss if change is None else change(loss)

        trials = self.trials
        gradient = trials.gradient_of(self.step, batch, look=look)
        loss, terms, head, drew = seen[0]
        return TrialStep(
            gradient=gradient,
            terms=terms,
            loss=loss,
            head=head,
            drew=drew,
            logged=trials.logged,
            returned=trials.returned,
            values=trials.values,
            left=trials.captured or {},
            changes=trials.changes,
            drawn=trials.drawn,
        )

    def whole(self, change: Callable[[Tensor], Tensor] | None = None) -> TrialStep:
        """Run the whole again, with the same random numbers."""
        self.hand_out(None)
        return self.run(self.rows.whole, change)

    def draw_without_rows(self) -> bool:
        """Whether the whole draws numbers that belong to no row; runs it again to see."""
        draws, rows = self.draws, sum(self.rows.sizes)
        if draws is None:
            with SharedDraws() as draws:
                draws.record()
                self.run(self.rows.whole)
        return draws.has_draws_without_rows(rows)

    def part(self, index: int, change: Callable[[Tensor], Tensor] | None = None) -> TrialStep | None:
        """Run a micro-batch; None if the step returns None for it, though not for the whole."""

        def run() -> TrialStep | None:
            try:
                return self._run_here(self.rows.parts[index], change)
            except StepFailedError as error:
                if not error.skipped:
                    raise
                return None

        self.hand_out(index)
        return self.together(run)

    def spans(self) -> Any:
        """The range of each parameter in a sampled gradient."""
        return spans_of(self.step.run.module)

    def miss(
        self,
        comparison: Comparison,
        gradients: Sequence[Tensor],
        weights: Sequence[float],
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> Miss:
        """By how much the micro-batches' gradients miss the whole's, on the rank with the largest miss.

        If they do, the whole runs once more with the last bits of the weights flipped: forwards of other
        shapes round differently, too, and a deep net may amplify that.

        Args:
            comparison: compares with the whole's gradient.
            gradients: the gradients of the micro-batches.
            weights: their weights.
            change: maps the step's loss to the one of this comparison.
        """
        miss = self._largest(comparison.miss(gradients, weights))
        if miss.excess > 1 and self.is_exact and not comparison.knows_rounding:
            with last_bits_turned(self.step.run.module):
                comparison.allow(self.whole(change).gradient)
            miss = self._largest(comparison.miss(gradients, weights))
        return miss

    def _largest(self, miss: Miss) -> Miss:
        excess, error = largest_of_ranks(self.step.run, [miss.excess, miss.relative_error])
        return replace(miss, excess=excess, relative_error=error)


def several_count(parts: Sequence[TrialStep | None]) -> bool:
    """Whether more than one micro-batch counts."""
    return sum(part is not None and part.counts for part in parts) > 1


def _ending(failure: Exception | None) -> int:
    """The outcome of a trial on this rank."""
    if failure is None:
        return _OK
    if not isinstance(failure, StepFailedError):
        return _FAILED
    return _PASSED_OVER if failure.skipped else _OUT_OF_MEMORY if is_out_of_memory(failure.cause) else _FAILED

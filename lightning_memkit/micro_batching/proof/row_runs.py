"""Some rows of a batch, run whole and in parts; no trace is left, and ranks try at the same time."""

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
from lightning_memkit.micro_batching.graph.loss_rules import LossRules
from lightning_memkit.micro_batching.graph.loss_terms import LossTerms
from lightning_memkit.micro_batching.graph.loss_walk import terms_of
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
class ComparisonOutcome:
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
        return not self.is_lone and several_count(self.parts)

    @property
    def present(self) -> list[int]:
        """The parts that are not passed over."""
        return [index for index, part in enumerate(self.parts) if part is not None]

    @property
    def present_shares(self) -> list[float]:
        """What each of these weighs."""
        return self.shares if self.rules is not None else [self.shares[index] for index in self.present]


class RowRuns:
    """Runs rows whole and in parts.

    Args:
        step: whose rows they are.
        trials: run them.
        rows: to run.
        draws: hands the whole's random numbers out to its parts; None where the step draws none that matter.
    """

    def __init__(self, step: Step, trials: Trials, rows: Rows, draws: SharedDraws | None) -> None:
        self.step, self.trials, self.rows, self.draws = step, trials, rows, draws
        self.is_exact = step.run.precision in ("32-true", "64-true")
        # Where ranks meet in every part, a gradient is that of all ranks' parts, each scaled before its backward.
        self.meets = trials.ranks.meets

    def hand_out(self, part: int | None) -> None:
        """The next run gets the random numbers of a part's rows; of the whole, its own again."""
        if self.draws is not None:
            sizes = self.rows.sizes
            total = sum(sizes)
            first = 0 if part is None else sum(sizes[:part])
            self.draws.hand_out(first, total if part is None else sizes[part], total)

    def together(self, run: Callable[[], T]) -> T:
        """What ranks try at the same time; a failure on one is one on all, so that none waits for the others.

        Raises:
            NothingCountsError: another rank's module passes over its rows.
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
            del failure  # its traceback, and with it this frame, holds the failed step's tensors
        if worst == _PASSED_OVER:
            raise NothingCountsError
        if worst == _OUT_OF_MEMORY:
            cause = torch.OutOfMemoryError("Another rank ran out of memory in a trial.")
            raise StepFailedError(cause, skipped=False)
        if worst == _FAILED:
            raise StepFailedError(RuntimeError("The step raised on another rank in a trial."), skipped=False)
        return results[0]

    def run(self, batch: Any, change: Callable[[Tensor], Tensor] | None = None) -> TrialStep:
        """A trial step on some rows, on all ranks; `change` gives what is differentiated in place of its loss."""
        return self.together(partial(self._run_here, batch, change))

    def _run_here(self, batch: Any, change: Callable[[Tensor], Tensor] | None) -> TrialStep:
        seen: list[tuple[Tensor, LossTerms]] = []

        def look(loss: Tensor) -> Tensor:
            seen.append((loss.detach(), terms_of(loss)))
            return loss if change is None else change(loss)

        trials = self.trials
        gradient = trials.gradient_of(self.step, batch, look=look)
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

    def whole(self, change: Callable[[Tensor], Tensor] | None = None) -> TrialStep:
        """The whole's run once more, with the same random numbers."""
        self.hand_out(None)
        return self.run(self.rows.whole, change)

    def part(self, index: int, change: Callable[[Tensor], Tensor] | None = None) -> TrialStep | None:
        """A part's run; None where the module passes over it, though it has a loss of the whole."""

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
        """Where each parameter's numbers are in a sampled gradient."""
        return spans_of(self.step.run.module)

    def miss(
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
        if miss.excess > 1 and self.is_exact and not comparison.knows_rounding:
            with last_bits_turned(self.step.run.module):
                comparison.allow(self.whole(change).gradient)
            miss = self._largest(comparison.miss(gradients, weights))
        return miss

    def _largest(self, miss: Miss) -> Miss:
        return replace(miss, excess=largest_of_ranks(self.step.run, [miss.excess])[0])


def several_count(parts: Sequence[TrialStep | None]) -> bool:
    """Whether more than one part counts."""
    return sum(part is not None and part.counts for part in parts) > 1


def _ending(failure: Exception | None) -> int:
    """How a trial has ended on this rank."""
    if failure is None:
        return _OK
    if not isinstance(failure, StepFailedError):
        return _FAILED
    return _PASSED_OVER if failure.skipped else _OUT_OF_MEMORY if is_out_of_memory(failure.cause) else _FAILED

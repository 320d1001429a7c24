"""Run two micro-batches together and apart, to learn how logged and returned values add up."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_memkit.memory.meter import unmetered
from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching.proof.trial_values import StepFailedError, TrialValues
from lightning_memkit.micro_batching.proof.trials import Trials
from lightning_memkit.micro_batching.proof.without_noise import LEVELS, quiet
from lightning_memkit.micro_batching.run import Step


class ValueLooks:
    """Three trial forwards of at most two micro-batches each; without a graph if the step allows it.

    If the step draws random numbers, they are recorded and handed out by rows; if that fails, the forwards
    run in eval mode. The next look begins with the mode that worked.

    Args:
        trials: runs the forwards.

    Attributes:
        ran_out: the latest look ended since the two micro-batches did not fit as one.
    """

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self.ran_out = False
        self._gradient = False  # whether the step fails without a graph: it differentiates something itself
        self._level = 0  # how much noise is removed, see `quiet`

    def __call__(
        self, step: Step, whole: Any, parts: Sequence[Any], sizes: Sequence[int]
    ) -> list[TrialValues] | None:
        """What the whole and then each micro-batch log and return; None if the step fails, or stays random.

        Args:
            step: the step of these rows, after its backward.
            whole: the rows of both micro-batches as one.
            parts: the two micro-batches.
            sizes: their numbers of rows.
        """
        self.ran_out = False
        for level in LEVELS[self._level :]:
            told = self._told(step, whole, parts, sizes, level)
            if told is None:
                return None
            if any(values.drew_elsewhere for values in told) and not self._trials.draws.proven:
                return None
            if not any(values.drew for values in told):
                return told
            self._level = level  # a step that draws once will draw again
        return None

    def _told(
        self, step: Step, whole: Any, parts: Sequence[Any], sizes: Sequence[int], level: int
    ) -> list[TrialValues] | None:
        for gradient in (False, True)[self._gradient :]:
            try:
                told = self._run(step, whole, parts, sizes, level, gradient=gradient)
            except StepFailedError as error:  # a user's step may fail in any way on rows joined like this
                step.run.debug(f"MemoryBudget can't look at two micro-batches: {error.cause!r}")
                self.ran_out = is_out_of_memory(error.cause)
                if error.skipped or self.ran_out:
                    return None
                continue
            self._gradient = gradient
            return told
        return None

    def _run(
        self,
        step: Step,
        whole: Any,
        parts: Sequence[Any],
        sizes: Sequence[int],
        level: int,
        *,
        gradient: bool,
    ) -> list[TrialValues]:
        with unmetered(), quiet(step.run.module, level) as draws:
            if draws is not None:
                draws.record()
            told = [self._trials.values_of(step, whole, gradient=gradient)]
            for index, part in enumerate(parts):
                if draws is not None:
                    draws.hand_out(sum(sizes[:index]), sizes[index], sum(sizes))
                told.append(self._trials.values_of(step, part, gradient=gradient))
        handed_out = draws is not None and draws.complete
        return [replace(values, drew=values.drew and not handed_out) for values in told]

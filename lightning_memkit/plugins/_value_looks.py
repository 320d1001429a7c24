"""Two of a batch's parts run as one, which tells how what is logged and returned comes from parts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_memkit.memory.meter import unmetered
from lightning_memkit.micro_batching.without_noise import LEVELS, quiet
from lightning_memkit.plugins import _seam
from lightning_memkit.plugins._trials import Trials, Values


class ValueLooks:
    """Costs three forwards that leave no trace, without a gradient where the step allows it, of two parts at most.

    Args:
        trials: run the forwards.
    """

    def __init__(self, trials: Trials) -> None:
        self._trials, self._gradient, self._level = trials, False, 0

    def __call__(
        self, step: _seam.Step, whole: Any, parts: Sequence[Any], sizes: Sequence[int]
    ) -> list[Values] | None:
        """What the whole and then each part log and return; None where that fails, or is random.

        Args:
            step: whose rows they are, after its backward.
            whole: the rows of all parts.
            parts: the same rows.
            sizes: how many rows each has.
        """
        for level in LEVELS[self._level :]:
            told = self._run(step, whole, parts, sizes, level)
            if told is None and not self._gradient:
                self._gradient = True  # a step may differentiate something itself
                told = self._run(step, whole, parts, sizes, level)
            if told is None:
                return None
            if not any(values.drew for values in told):
                return told
            self._level = level  # what draws once will draw again
        return None

    def _run(
        self, step: _seam.Step, whole: Any, parts: Sequence[Any], sizes: Sequence[int], level: int
    ) -> list[Values] | None:
        with unmetered(), quiet(step.trainer.lightning_module, level) as draws:
            if draws is not None:
                draws.record()
            found = [self._trials.values_of(step, whole, gradient=self._gradient)]
            for index, part in enumerate(parts):
                if draws is not None:
                    draws.hand_out(sum(sizes[:index]), sizes[index], sum(sizes))
                found.append(self._trials.values_of(step, part, gradient=self._gradient))
        told = [values for values in found if values is not None]
        if len(told) < len(found):
            return None
        # Numbers that are handed out are the same for both.
        return [replace(run, drew=run.drew and not (draws is not None and draws.complete)) for run in told]

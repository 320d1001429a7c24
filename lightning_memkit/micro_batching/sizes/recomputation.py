"""`ActivationCheckpointing("auto")` beside a `MemoryBudget`: the measured peak corrects what it chose, once."""

from collections.abc import Callable
from dataclasses import replace

from lightning_memkit.memory.sizing import TOLERANCE, Sizing, Trial
from lightning_memkit.micro_batching.ranks.agreement import any_rank
from lightning_memkit.micro_batching.run import Run

_BESIDE = 0.01  # of the budget: operators are whole


class AutomaticPolicy:
    """Makes more again where the measured peak is over the budget, and less where it leaves more than 5 % unused.

    Args:
        run: whose ranks measure together, and whose plan chooses, if there is one.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._plan = run, run.recomputation

    def tightened(self, peak_bytes: int | None, usable_bytes: int) -> bool:
        """Whether more is made again now, because what was chosen takes too much."""
        if self._plan is None or peak_bytes is None or peak_bytes <= usable_bytes:
            return False
        self._plan.resize(usable_bytes - peak_bytes - int(_BESIDE * usable_bytes))
        return True

    def loosened(self, sizing: Sizing, peak_of: Callable[[int], int | None], usable_bytes: int) -> Sizing:
        """The same size with less made again, measured anew; as it was where that does not fit."""
        plan, spare = self._plan, usable_bytes - sizing.peak_bytes
        if plan is None or spare <= TOLERANCE * usable_bytes:
            return sizing
        if not any_rank(
            self._run, plan.makes_again
        ):  # ranks choose by their own clocks, and measure together
            return sizing
        spare -= int(_BESIDE * usable_bytes)
        plan.resize(spare)
        peak = peak_of(sizing.micro_batch_size)
        if peak is None or peak > usable_bytes:
            plan.resize(-spare)
            return sizing
        trial = Trial(micro_batch_size=sizing.micro_batch_size, peak_bytes=peak)
        return replace(sizing, peak_bytes=peak, trials=(*sizing.trials, trial))

"""`ActivationCheckpointing("auto")` with a `MemoryBudget`: the measured peak corrects its choice, once."""

from collections.abc import Callable
from dataclasses import replace

from lightning_memkit.memory.sizing import TOLERANCE, Sizing, Trial
from lightning_memkit.micro_batching.ranks.agreement import any_rank
from lightning_memkit.micro_batching.run import Run

_BESIDE = 0.01  # of the budget, left free: recomputation is chosen by whole operators, not to the byte


class AutomaticPolicy:
    """Recomputes more if the measured peak exceeds the budget, and less if it leaves more than 5 % unused.

    Args:
        run: the loop, with its plan of recomputation, if there is one.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._plan = run, run.recomputation

    def tightened(self, peak_bytes: int | None, usable_bytes: int) -> bool:
        """Recompute more if the peak exceeds the budget; True if anything changed."""
        if self._plan is None or peak_bytes is None or peak_bytes <= usable_bytes:
            return False
        self._plan.resize(usable_bytes - peak_bytes - int(_BESIDE * usable_bytes))
        return True

    def loosened(self, sizing: Sizing, peak_of: Callable[[int], int | None], usable_bytes: int) -> Sizing:
        """The same size with less recomputation, measured again; unchanged if that does not fit."""
        plan, spare = self._plan, usable_bytes - sizing.peak_bytes
        if plan is None or spare <= TOLERANCE * usable_bytes:
            return sizing
        # Ranks choose what to recompute by their own timings, but must measure together.
        if not any_rank(self._run, plan.makes_again):
            return sizing
        spare -= int(_BESIDE * usable_bytes)
        plan.resize(spare)
        peak = peak_of(sizing.micro_batch_size)
        if peak is None or peak > usable_bytes:
            plan.resize(-spare)
            return sizing
        trial = Trial(micro_batch_size=sizing.micro_batch_size, peak_bytes=peak)
        return replace(sizing, peak_bytes=peak, trials=(*sizing.trials, trial))

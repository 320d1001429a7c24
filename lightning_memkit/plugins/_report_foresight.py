"""What is predicted of the run's own module, which stays as it is."""

from typing import Any

from lightning.pytorch import Trainer

from lightning_memkit.memory.report import Advice, PredictedStep, StepReport


class Foresight:
    """Predicts the metered step, and what would save memory, in a fork of the process.

    Args:
        predict: the metered step.
        advise: single changes.
    """

    def __init__(self, *, predict: bool, advise: bool) -> None:
        self._predict, self._advise = predict, advise
        self.predicted: PredictedStep | None = None
        self.advice: tuple[Advice, ...] = ()

    def before(self, trainer: Trainer, batch: Any, batches: int, measured: int) -> None:
        """A batch begins."""

    def failed(self, trainer: Trainer, step: int, error: BaseException) -> StepReport | None:
        """A step ran out of memory that was not metered."""

    def forget(self) -> None:
        """Training is over."""

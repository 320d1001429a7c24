"""Predict the run's own step in a fork or on a copy, leaving the run unchanged."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_memkit.memory.report import Advice, PredictedStep
from lightning_memkit.micro_batching import SplitError, batch_size
from lightning_memkit.planning.budget import Budget
from lightning_memkit.plugins.asked import budget_of
from lightning_memkit.plugins.memory_report._advice import (
    RunAsProblem,
    RunsBatch,
    advice,
    predicted_step,
)
from lightning_memkit.plugins.planning._given_run import GivenRun, predict_apart
from lightning_memkit.prediction.devices import Device

_MOST_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class PredictedRun:
    """The results of a prediction.

    Args:
        predicted: the step.
        advice: changes that would save memory.
    """

    predicted: PredictedStep | None = None
    advice: tuple[Advice, ...] = ()


class Foresight:
    """Predicts a training step, and what would save memory in it; the run itself is unchanged.

    On the CPU it predicts the metered step. On a GPU it predicts the first batch: before any backward,
    autograd still works in a fork; later a copy would be needed, which takes more.

    Args:
        predict: whether to predict the step.
        advise: whether to predict single changes to it.
    """

    def __init__(self, *, predict: bool, advise: bool) -> None:
        self._predict, self._advise = predict, advise
        self.found = PredictedRun()

    def before_first(self, trainer: Trainer, batch: Any) -> None:
        """On a GPU, predict the first batch before it runs."""
        if trainer.strategy.root_device.type != "cpu":
            self._foresee(trainer, batch)

    def after_metered(self, trainer: Trainer, batch: Any) -> None:
        """On the CPU, predict the metered batch after it has run."""
        if trainer.strategy.root_device.type == "cpu":
            self._foresee(trainer, batch)

    def _foresee(self, trainer: Trainer, batch: Any) -> None:
        if not (self._predict or self._advise):
            return
        try:
            work = self._work(trainer, batch)
            self.found = predict_apart(trainer, work, timeout_s=_MOST_SECONDS)
        except Exception as error:  # whatever the user's step or its prediction raises, the run goes on
            said = str(error).strip().splitlines()
            what = f"not predicted: {said[0] if said else type(error).__name__}"
            self.found = PredictedRun(predicted=PredictedStep(what=what))

    def _work(self, trainer: Trainer, batch: Any) -> Callable[[GivenRun], PredictedRun]:
        """The work to do in the fork.

        Raises:
            ValueError: this step can't be predicted.
        """
        if trainer.world_size > 1:
            raise ValueError('several ranks train; predict_memory(trainer={"devices": ...}) predicts them')
        if not trainer.lightning_module.automatic_optimization:
            raise ValueError("the module optimizes manually; predict_memory predicts its training_step")
        host, rows, size = _part(trainer, batch)
        budget = budget_of(trainer)
        described = RunsBatch(
            content=host,
            rows=rows,
            size=size,
            budget=None if budget is None else budget.budget,
            device=_device(trainer),
        )

        def work(given: GivenRun) -> PredictedRun:
            run = RunAsProblem(given, described)
            return PredictedRun(
                predicted=predicted_step(run) if self._predict else None,
                advice=advice(run) if self._advise else (),
            )

        return work


def _device(trainer: Trainer) -> Device | None:
    return None if trainer.strategy.root_device.type == "cpu" else Budget().target()


def _part(trainer: Trainer, batch: Any) -> tuple[Any, int, int]:
    """The batch on the host, its rows, and the rows of a micro-batch."""
    host = apply_to_collection(batch, Tensor, Tensor.cpu)
    try:
        rows = batch_size(host)
    except SplitError:
        return host, 1, 1
    budget = budget_of(trainer)
    if budget is None:
        return host, rows, rows
    if budget.history:
        return host, rows, min(rows, budget.history[-1].micro_batch_size)
    if budget.micro_batch_size == "auto":
        raise ValueError(
            "MemoryBudget has not chosen its micro-batch yet; on a GPU give micro_batch_size= to have it predicted"
        )
    return host, rows, min(rows, int(budget.micro_batch_size))

"""Make the report of a step that was metered, or that ran out of memory."""

from typing import Any

from lightning.pytorch import Trainer

from lightning_memkit.memory.report import StepReport
from lightning_memkit.plugins.memory_report._facts import facts
from lightning_memkit.plugins.memory_report._foresight import Foresight
from lightning_memkit.plugins.memory_report._meter import BatchMeter, census


def metered_report(
    trainer: Trainer, number: int, meter: BatchMeter, fixed: int, foresight: Foresight, *, advised: bool
) -> StepReport:
    """The report of a metered step, with its prediction.

    Args:
        trainer: the trainer of the run.
        number: the number of the batch.
        meter: the meter of the step, already left.
        fixed: bytes that the process or the device uses besides tensors.
        foresight: holds the prediction.
        advised: whether advice was requested.
    """
    return StepReport(
        step=meter.step(fixed),
        run=facts(trainer, number),
        flops=meter.flops,
        predicted=foresight.found.predicted,
        advice=foresight.found.advice,
        advised=advised,
    )


def failed_report(
    trainer: Trainer, number: int, meter: BatchMeter | None, fixed: int, batch: Any, error: BaseException
) -> StepReport:
    """The report of a step that ran out of memory: from its meter, or else from a census of live tensors.

    Args:
        trainer: the trainer of the run.
        number: the number of the batch.
        meter: the meter of the step; None if it was not metered.
        fixed: bytes that the process or the device uses besides tensors.
        batch: the training batch.
        error: the out-of-memory error.
    """
    return StepReport(
        step=census(trainer, batch, fixed) if meter is None else meter.failed_step(fixed),
        run=facts(trainer, number),
        metered=meter is not None,
        failure=f"{type(error).__name__}: {error}",
    )

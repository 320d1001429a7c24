"""A step taken apart, with what was run: one that was metered, or one that ran out of memory."""

from typing import Any

from lightning.pytorch import Trainer

from lightning_memkit.memory.report import StepReport
from lightning_memkit.plugins.memory_report._facts import facts
from lightning_memkit.plugins.memory_report._foresight import Foresight
from lightning_memkit.plugins.memory_report._meter import BatchMeter, census


def metered_report(
    trainer: Trainer, number: int, meter: BatchMeter, fixed: int, foresight: Foresight, *, advised: bool
) -> StepReport:
    """Of a metered step, with what was predicted of it.

    Args:
        trainer: whose step it was.
        number: of the batch.
        meter: has seen the step, and is left.
        fixed: bytes that the process or the device holds besides tensors.
        foresight: what was predicted.
        advised: advice was asked for.
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
    """Of a step that ran out of memory: by its meter, or a census of what lives.

    Args:
        trainer: whose step it is.
        number: of the batch.
        meter: is metering the step; None: nothing is.
        fixed: bytes that the process or the device holds besides tensors.
        batch: what is trained on.
        error: says that memory ran out.
    """
    return StepReport(
        step=census(trainer, batch, fixed) if meter is None else meter.failed_step(fixed),
        run=facts(trainer, number),
        metered=meter is not None,
        failure=f"{type(error).__name__}: {error}",
    )

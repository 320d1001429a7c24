"""What MemoryBudget says about a run before it starts."""

import inspect
import warnings

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn


def warn_of_inexactness(trainer: Trainer, module: LightningModule) -> None:
    """Name what is not exact in parts: batch statistics, unweighted accumulation, hooks that run once a part."""
    names = with_batch_statistics(module)
    if names:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        warnings.warn(
            f"{shown} normalize with statistics of the batch: in parts they see each part's, as under any "
            "gradient accumulation, and update their running averages once a part.",
            stacklevel=3,
        )
    if type(module).on_after_backward is not LightningModule.on_after_backward:
        warnings.warn(
            f"{type(module).__name__}.on_after_backward runs after every part, on gradients that are not complete; "
            "what changes gradients belongs into on_before_optimizer_step, which runs once.",
            stacklevel=3,
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        warnings.warn(
            f"{type(module).__name__}.training_step fetches its batches itself (dataloader_iter): MemoryBudget stands "
            "aside; take `batch` instead.",
            stacklevel=3,
        )


def check_accumulation(trainer: Trainer, effective_batch_size: int | None) -> None:
    """Accumulation is either Lightning's, with a warning, or exact.

    Raises:
        ValueError: both are asked for.
    """
    scheduled = any(isinstance(c, GradientAccumulationScheduler) for c in vars(trainer)["callbacks"])
    if trainer.accumulate_grad_batches == 1 and not scheduled:
        return
    if effective_batch_size is not None:
        asked = "GradientAccumulationScheduler" if scheduled else "accumulate_grad_batches"
        raise ValueError(
            f"effective_batch_size={effective_batch_size} and {asked} both say how many loader batches make a step; "
            f"remove {asked}."
        )
    warnings.warn(
        f"accumulate_grad_batches={trainer.accumulate_grad_batches} weighs its batches equally, whatever "
        "labels they hold; MemoryBudget(effective_batch_size=...) accumulates them exactly.",
        stacklevel=3,
    )


def with_batch_statistics(module: nn.Module) -> list[str]:
    """The names of the modules that normalize with statistics of the batch, as long as they train."""
    norm = nn.modules.batchnorm._BatchNorm
    return [name for name, child in module.named_modules() if isinstance(child, norm) and child.training]

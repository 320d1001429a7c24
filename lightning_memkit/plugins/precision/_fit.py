"""The fit that a module is in: its trainer, its stage, and how many batches make a step."""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_memkit.plugins.seams.lightning_run import averages_after_backward


def trainer_of(module: nn.Module) -> Trainer | None:
    """The trainer of a LightningModule, or of one that a strategy has wrapped."""
    trainer = getattr(unwrapped(module), "_trainer", None)
    return trainer if isinstance(trainer, Trainer) else None


def unwrapped(module: nn.Module) -> nn.Module:
    """The LightningModule inside a strategy's wrapper."""
    return module if isinstance(module, LightningModule) else getattr(module, "module", module)


def is_fitting(module: nn.Module) -> bool:
    """Whether the module is in a fit; also True if it has no trainer."""
    trainer = trainer_of(module)
    return trainer is None or trainer.state.fn == TrainerFn.FITTING


def batches_per_step(module: nn.Module) -> int:
    """The most batches that Lightning's own accumulation combines in a step of this fit."""
    trainer = trainer_of(module)
    if trainer is None:
        return 1
    most = trainer.accumulate_grad_batches
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, GradientAccumulationScheduler):
            most = max(most, *callback.scheduling.values())
    return most


def averages_late(model: nn.Module) -> bool:
    """Whether `MemoryBudget` averages DDP's gradients after the backward."""
    trainer = trainer_of(model)
    is_ddp = isinstance(model, DistributedDataParallel)
    return is_ddp and trainer is not None and averages_after_backward(trainer, model)

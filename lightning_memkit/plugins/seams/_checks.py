"""Checks and warnings of MemoryBudget before a run starts."""

import dis
import inspect
import warnings
from functools import lru_cache
from types import CodeType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler
from torch.optim import Optimizer

from lightning_memkit.micro_batching.batch_statistics import with_batch_statistics, with_running_averages
from lightning_memkit.micro_batching.parts.complete_gradients import OWN, TABLE, CompleteGradients, is_known
from lightning_memkit.micro_batching.proof.verdicts import AFTER_GRADIENT


def warn_of_inexactness(trainer: Trainer, module: LightningModule) -> None:
    """Warn about modules whose result depends on the micro-batch, or which fetch batches themselves."""
    names = with_batch_statistics(module)
    if names:
        warnings.warn(
            f"{_shown(names)} normalize with statistics of the batch: of a split batch they see each "
            "micro-batch's, as under any gradient accumulation, and update their running averages once a "
            "micro-batch.",
            stacklevel=3,
        )
    names = with_running_averages(module)
    if names:
        warnings.warn(
            f"{_shown(names)} keep running averages of what they normalize (track_running_stats=True): of a split "
            "batch they update these once a micro-batch, so evaluation reads other averages. Gradients are exact; for "
            "the same averages keep the batch whole (micro_batch_size = the loader's batch size).",
            stacklevel=3,
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        warnings.warn(
            f"{type(module).__name__}.training_step fetches its batches itself (dataloader_iter): MemoryBudget stands "
            "aside; take `batch` instead.",
            stacklevel=3,
        )


def _shown(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def hooks_run_by_micro_batch(trainer: Trainer, module: LightningModule) -> list[str]:
    """The user's hooks that run once a micro-batch, on gradients that are not complete, in order.

    These are `on_before_backward`, and hooks on parameters' gradients; `on_after_backward` and hooks on complete
    gradients run once a batch.
    Left out are Lightning's callbacks and ours, hooks registered by torch, Lightning or us, and callbacks
    that declare `sees_micro_batches = True`.
    """
    found = [
        f"{type(callback).__name__}.on_before_backward"
        for callback in vars(trainer)["callbacks"]
        if type(callback).on_before_backward is not Callback.on_before_backward
        and not is_known(type(callback).on_before_backward)
        and not getattr(callback, "sees_micro_batches", False)
    ]
    if not is_known(type(module).on_before_backward):
        found.append(f"{type(module).__name__}.on_before_backward")
    for name, parameter in module.named_parameters():
        before = parameter._backward_hooks or {}
        found += [f"a hook on {name}'s gradient" for hook in before.values() if not is_known(hook)]
    if CompleteGradients(module, trainer.world_size).incomplete:
        tables = {name: getattr(p, TABLE, None) or {} for name, p in module.named_parameters()}
        hooked = [name for name, hooks in tables.items() if not all(map(is_known, hooks.values()))]
        found += [f"a hook on {name}{AFTER_GRADIENT}" for name in hooked]
    return list(dict.fromkeys(found))


def hooks_run_before_zero_grad(trainer: Trainer, module: LightningModule) -> list[str]:
    """The user's hooks that run between the first micro-batch's forward and the others'."""
    owners: list[Any] = [*vars(trainer)["callbacks"], module]
    hooks = [(owner, "on_before_zero_grad") for owner in owners] + [(module, "optimizer_zero_grad")]
    return [
        f"{type(owner).__name__}.{name}" for owner, name in hooks if not is_known(getattr(type(owner), name))
    ]


def zeroes_gradients(module: LightningModule, optimizer: Optimizer) -> bool:
    """Whether `optimizer_zero_grad` leaves no gradient: it is Lightning's own, or only calls zero_grad."""
    return _only_zeroes(module.optimizer_zero_grad) and _only_zeroes(optimizer.zero_grad)


def _only_zeroes(method: Any) -> bool:
    function = getattr(method, "__func__", method)
    if str(getattr(function, "__module__", "")).startswith(OWN):
        return True
    code = getattr(function, "__code__", None)
    return code is not None and _only_calls_zero_grad(code)


@lru_cache(maxsize=64)
def _only_calls_zero_grad(code: CodeType) -> bool:
    if not set(code.co_names) <= {"zero_grad", "optimizer_zero_grad", "super"}:
        return False
    always = not any("JUMP" in one.opname or "FOR_ITER" in one.opname for one in dis.get_instructions(code))
    return always and bool({"zero_grad", "optimizer_zero_grad"} & set(code.co_names))


def check_accumulation(trainer: Trainer, effective_batch_size: int | None) -> None:
    """Accept either Lightning's accumulation, with a warning, or the exact one.

    Raises:
        ValueError: both are requested, or a finder will change the loader's batches.
    """
    callbacks = vars(trainer)["callbacks"]
    if effective_batch_size is not None and any(isinstance(c, BatchSizeFinder) for c in callbacks):
        raise ValueError(
            f"effective_batch_size={effective_batch_size} is made of loader batches, whose size BatchSizeFinder "
            "(Tuner.scale_batch_size) changes; remove the finder, or effective_batch_size."
        )
    scheduled = any(isinstance(c, GradientAccumulationScheduler) for c in callbacks)
    if trainer.accumulate_grad_batches == 1 and not scheduled:
        return
    said = f"accumulate_grad_batches={trainer.accumulate_grad_batches}"
    said = "GradientAccumulationScheduler" if scheduled else said
    if effective_batch_size is not None:
        asked = "GradientAccumulationScheduler" if scheduled else "accumulate_grad_batches"
        raise ValueError(
            f"effective_batch_size={effective_batch_size} and {asked} both say how many loader batches make a step; "
            f"remove {asked}."
        )
    warnings.warn(
        f"{said} weighs its batches equally, whatever "
        "labels they hold; MemoryBudget(effective_batch_size=...) accumulates them exactly.",
        stacklevel=3,
    )

"""Refuses runs in which gradients can't be released, and warns about hooks that find none or come too late."""

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_memkit.optim.gradient_release import Release
from lightning_memkit.plugins.asked import budgets_among, callbacks_of
from lightning_memkit.utilities.source_uses import uses_attribute

_SEE_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")
_MAY_CHANGE_WEIGHTS = ("backward", "optimizer_step")


def check_setup(trainer: Trainer, module: LightningModule) -> None:
    """Refuse runs that the Trainer's arguments and the module's methods show to be incompatible.

    Raises:
        ValueError: with the remedy.
    """
    _check_run(trainer, module)
    _check_module(module, clips_norm=_clips_norm(trainer))
    _check_budget(trainer)


def _check_run(trainer: Trainer, module: LightningModule) -> None:
    """Refuse runs that the Trainer's arguments show to be incompatible."""
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__} optimizes manually, so GradientRelease can't know which backward is to step; "
            "call lightning_memkit.optim.gradient_release.release_gradients(optimizer) in the module itself."
        )
    batches = trainer.accumulate_grad_batches
    for callback in callbacks_of(trainer):
        if isinstance(callback, GradientAccumulationScheduler):
            batches = max(batches, *callback.scheduling.values())
    if batches > 1:
        raise ValueError(
            f"accumulate_grad_batches={batches}: released gradients can't accumulate over batches; set it to 1 and "
            "take larger batches (activation checkpointing makes room for them), or remove GradientRelease."
        )
    strategy = trainer.strategy
    if not isinstance(strategy, (SingleDeviceStrategy, ModelParallelStrategy)):
        raise ValueError(
            f"GradientRelease can't go with {type(strategy).__name__}: it reduces gradients after the hooks that step "
            "on them, or holds them itself. Use one device, or ModelParallelStrategy with fully_shard (FSDP2)."
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ValueError(
            f"precision={trainer.precision_plugin.precision!r} scales the loss and looks for overflows in all "
            "gradients before the step; with GradientRelease use 'bf16-mixed', '32-true' or PureBF16Precision."
        )


def _clips_norm(trainer: Trainer) -> bool:
    by_value = trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
    return bool(trainer.gradient_clip_val) and not by_value


def _check_module(module: LightningModule, *, clips_norm: bool) -> None:
    """Refuse modules that handle gradients in their own way."""
    name = type(module).__name__
    if is_overridden("configure_gradient_clipping", module):
        raise ValueError(
            f"{name}.configure_gradient_clipping clips after backward, when the gradients are gone; remove it and "
            "write Trainer(gradient_clip_val=..., gradient_clip_algorithm=...), which GradientRelease applies."
        )
    takes = inspect.signature(module.backward).parameters
    if (
        clips_norm
        and "retain_graph" not in takes
        and not any(p.kind is p.VAR_KEYWORD for p in takes.values())
    ):
        raise ValueError(
            f"{name}.backward takes no retain_graph, which clipping by norm needs for its measuring backward; write "
            "`def backward(self, loss, *args, **kwargs)` and pass them on to loss.backward."
        )
    for path, layer in module.named_modules():
        if getattr(layer, "sparse", False) and isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(
                f"{path} has sparse=True: sparse gradients can't be released; build it with sparse=False."
            )


def _check_budget(trainer: Trainer) -> None:
    """Refuse a MemoryBudget that may retry or split a step, as far as its options tell."""
    for budget in budgets_among(callbacks_of(trainer)):
        if budget.recover:
            raise ValueError(
                "MemoryBudget(recover=True) retries a step that runs out of memory, and with GradientRelease part of "
                "the weights are stepped by then; write MemoryBudget(recover=False), or remove GradientRelease."
            )
        if budget.micro_batch_size == "auto" or budget.effective_batch_size is not None:
            raise ValueError(
                f"MemoryBudget(micro_batch_size={budget.micro_batch_size!r}, effective_batch_size="
                f"{budget.effective_batch_size!r}) may run a step in micro-batches, and GradientRelease takes one; "
                "write the loader's batch size as micro_batch_size, and no effective_batch_size."
            )


def warn_of_the_blind(trainer: Trainer, module: LightningModule) -> None:
    """Warn about user hooks that expect gradients but run when they are gone."""
    hooks = [name for name, hook, _ in _users_hooks(trainer, module) if hook in _SEE_GRADIENTS]
    if hooks:
        warnings.warn(
            f"{', '.join(hooks)} find no gradients (.grad is None): with GradientRelease they are used and dropped "
            "within backward. They find weights that are stepped already, and must not change them.",
            stacklevel=3,
        )


def warn_of_the_late(trainer: Trainer, module: LightningModule, release: Release) -> None:
    """Warn about user hooks whose source reads gradients after the step, or may write weights unnoticed."""

    def spared(named: Any) -> bool:
        return isinstance(named, Tensor) and not (isinstance(named, nn.Parameter) and named in release)

    late, unnoticed = [], []
    for name, hook, function in _users_hooks(trainer, module):
        if hook in _MAY_CHANGE_WEIGHTS:
            unnoticed += [name] if uses_attribute(function, "data", spared) else []
        elif hook not in _SEE_GRADIENTS and uses_attribute(function, "grad", spared):
            late.append(name)
    if late:
        warnings.warn(
            f"{', '.join(late)} read gradients (.grad), which are None by then: with GradientRelease they are used "
            "and dropped within backward. Read them in a tensor hook (parameter.register_hook).",
            stacklevel=3,
        )
    if unnoticed:
        warnings.warn(
            f"{', '.join(unnoticed)} use .data, through which a change of weights goes unnoticed: with "
            "GradientRelease weights are stepped within backward. Change them before the forward or after the step.",
            stacklevel=3,
        )


def between_backward_and_step(trainer: Trainer, module: LightningModule) -> str:
    """The user's hooks that run after a parameter's step, and before that of the optimizer."""
    among = (*_SEE_GRADIENTS, *_MAY_CHANGE_WEIGHTS)
    return ", ".join(name for name, hook, _ in _users_hooks(trainer, module) if hook in among)


def _users_hooks(trainer: Trainer, module: LightningModule) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """The hooks that the module and the user's callbacks override: full name, name, method."""
    for owner in (module, *callbacks_of(trainer)):
        if owner is not module and type(owner).__module__.startswith(("lightning_memkit.", "lightning.")):
            continue
        for hook in dir(type(owner)):
            if (hook.startswith("on_") or hook in _MAY_CHANGE_WEIGHTS) and _overrides(owner, hook):
                yield f"{type(owner).__name__}.{hook}", hook, getattr(owner, hook)


def _overrides(owner: Any, hook: str) -> bool:
    parent = LightningModule if isinstance(owner, LightningModule) else Callback
    return callable(getattr(parent, hook, None)) and is_overridden(hook, owner, parent)

"""What a fault must not change in a training run, and whether two of it are bitwise the same."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor


def captured(trainer: Trainer, module: LightningModule, loader: Any) -> dict[str, Any]:
    """All that a fault must not change."""
    optimizer, schedule = trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler
    return {
        "weights": _host(dict(module.named_parameters())),
        "buffers": _host(dict(module.named_buffers())),
        "optimizer": _host([optimizer.state_dict(), getattr(optimizer, "kept", dict)()]),
        "rng": _host([torch.get_rng_state(), random.getstate(), list(np.random.get_state())]),
        "lr": [_host([group["lr"] for group in optimizer.param_groups]), _host(schedule.state_dict())],
        "global_step": trainer.global_step,
        "position": [list(loader.sampler.drawn), trainer.fit_loop.epoch_loop.batch_progress.state_dict()],
        "logged": _host(dict(trainer.callback_metrics)),
        "kept": _host(_kept(trainer, module)),
    }


def differences(ours: dict[str, Any], theirs: dict[str, Any], skip: Sequence[str] = ()) -> list[str]:
    """The names of what is not bitwise equal."""
    return [name for name in theirs if name not in skip and not _same(ours[name], theirs[name])]


def relative_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest difference of any weight, as a share of the largest weight.

    Not of the largest in its own tensor: attention's key bias has a gradient of zero but for rounding, which AdamW
    divides by its own size.
    """
    weights = theirs["weights"]
    largest = max(weight.abs().max() for weight in weights.values())
    return float(max((ours["weights"][name] - weights[name]).abs().max() for name in weights) / largest)


def _kept(trainer: Trainer, module: Any) -> list[Any]:
    """What the module's steps and the callbacks' hooks count."""
    callbacks = vars(trainer)["callbacks"]
    return [module.kept(), [one.backwards for one in callbacks if hasattr(one, "backwards")]]


def _host(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_host(item) for item in value]
    return value.copy() if isinstance(value, np.ndarray) else value


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, Tensor):
        if not isinstance(ours, Tensor) or (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            return False
        bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (ours, theirs)]
        return torch.equal(*bits)
    if isinstance(theirs, np.ndarray):
        return np.array_equal(ours, theirs)
    if isinstance(theirs, dict):
        return set(ours) == set(theirs) and all(_same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return type(ours) is type(theirs) and ours == theirs

"""Rolls an optimizer back to before a step, exactly: states, group scalars, weights, its own attributes.

Works on any `torch.optim.Optimizer`. A snapshot consists of copies and may be restored any number of times.
Before the first step most optimizers have no states, so that a snapshot costs little more than the weights.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memkit.optim.group_scalars import group_scalars, restore_group_scalars
from lightning_memkit.optim.modes import LOW_STATES
from lightning_memkit.optim.pages import pages_used_again
from lightning_memkit.optim.pieces import slots
from lightning_memkit.optim.step_copies import OwnAttributeCopies

_ABSENT = object()


@dataclass(frozen=True, kw_only=True)
class OptimizerSnapshot:
    """Copies of everything that a step of one optimizer changes.

    Args:
        weights: a copy of each parameter in order; empty if the caller copies the weights.
        states: the state of each key that had one, tensors copied.
        groups: the entries of each group, without its parameters.
        extra: everything else that a step changes.
    """

    weights: tuple[Tensor, ...]
    states: tuple[tuple[Any, Any], ...]
    groups: tuple[dict[str, Any], ...]
    extra: dict[str, Any]


def take_snapshot(
    optimizer: Optimizer, *, weights: bool = True, device: torch.device | None = None
) -> OptimizerSnapshot:
    """Copy everything that a step changes.

    Args:
        optimizer: any optimizer.
        weights: whether to copy the parameters, too.
        device: where the copies live; a CPU device keeps them out of an accelerator's memory.
    """
    parameters = [slot.parameter for slot in slots(optimizer)] if weights else []
    return OptimizerSnapshot(
        weights=tuple(_copy(parameter, device) for parameter in parameters),
        states=tuple((key, _copy(value, device)) for key, value in optimizer.state.items()),
        groups=tuple(group_scalars(optimizer)),
        extra={
            "opt_called": getattr(optimizer, "_opt_called", _ABSENT),
            "own": OwnAttributeCopies(optimizer, on_host=device is not None and device.type == "cpu"),
        },
    )


def restore_snapshot(optimizer: Optimizer, snapshot: OptimizerSnapshot, *, keep_new: bool = False) -> None:
    """Restore what `take_snapshot` copied; states that did not exist then are removed.

    Args:
        optimizer: the one that was copied.
        snapshot: the copy.
        keep_new: keep states that did not exist then, for `forget_new_states`.
    """
    if snapshot.weights:
        for slot, weight in zip(slots(optimizer), snapshot.weights, strict=True):
            slot.parameter.detach().copy_(weight)
    kept = dict(snapshot.states)
    with pages_used_again(optimizer):
        for key in [key for key in optimizer.state if key not in kept and not keep_new]:
            del optimizer.state[key]
        for key, value in kept.items():
            current = optimizer.state.get(key)
            restored = _restored(value, current, key)
            if keep_new and isinstance(current, dict) and isinstance(restored, dict):
                restored = {**_beside(restored, current), **restored}
            optimizer.state[key] = restored
    restore_group_scalars(optimizer, list(snapshot.groups))
    snapshot.extra["own"].restore()
    if snapshot.extra["opt_called"] is _ABSENT:
        optimizer.__dict__.pop("_opt_called", None)
    else:
        optimizer.__dict__["_opt_called"] = snapshot.extra["opt_called"]


def _beside(restored: dict[Any, Any], current: dict[Any, Any]) -> dict[Any, Any]:
    """New entries of a state; low halves only if the restored state has none, as a step may convert its kind."""
    compensated = any(name in restored for name in LOW_STATES)
    return {name: value for name, value in current.items() if not (compensated and name in LOW_STATES)}


def known_states(optimizer: Optimizer) -> dict[Any, frozenset[Any]]:
    """Which states exist: for each key the names in its state."""
    return {
        key: frozenset(value) if isinstance(value, dict) else frozenset()
        for key, value in optimizer.state.items()
    }


def forget_new_states(optimizer: Optimizer, known: dict[Any, frozenset[Any]]) -> None:
    """Remove the states that did not exist when `known_states` was called."""
    with pages_used_again(optimizer):
        for key in list(optimizer.state):
            if key not in known:
                del optimizer.state[key]
            elif isinstance(state := optimizer.state[key], dict):
                for name in [name for name in state if name not in known[key]]:
                    del state[name]


def _copy(value: Any, device: torch.device | None) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device or value.device, copy=True)
    if isinstance(value, dict):
        return {key: _copy(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item, device) for item in value)
    return deepcopy(value)


def _restored(kept: Any, current: Any, owner: Any) -> Any:
    """The copied value, written into the current tensor's memory if it fits."""
    if isinstance(kept, Tensor):
        if isinstance(current, Tensor) and current.dtype == kept.dtype and current.shape == kept.shape:
            current.detach().copy_(kept)
            return current
        device = owner.device if isinstance(owner, Tensor) and kept.dim() > 0 else kept.device
        return kept.to(device, copy=True)
    if isinstance(kept, dict):
        old = current if isinstance(current, dict) else {}
        return {key: _restored(item, old.get(key), owner) for key, item in kept.items()}
    if isinstance(kept, (list, tuple)):
        return type(kept)(_restored(item, None, owner) for item in kept)
    return deepcopy(kept)

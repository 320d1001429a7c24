"""Makes optimizer states survive `state_dict` and `load_state_dict` bit for bit, whatever their dtype.

`Optimizer.load_state_dict` casts every state but ``step`` to its parameter's dtype: with bfloat16 parameters
this rounds float32 moments and destroys int16 low halves (pytorch/pytorch#43706). The hooks here hide the
tensors from the cast and put them back as they were saved. The state dict holds only plain tensors and
primitives, so that ``torch.load(..., weights_only=True)`` reads it.
"""

from collections.abc import Iterable
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memkit.optim.modes import LOW_STATES
from lightning_memkit.optim.pieces import slots
from lightning_memkit.optim.split import LOW_HALF
from lightning_memkit.optim.stochastic_rounding import StochasticRounding
from lightning_memkit.utilities.patching import Undo

STATE_KEY = "memkit"  # the entry of the state dict that holds the seed and position of the rounding noise
LOW_HALVES_KEY = "low_halves"  # in that entry: those of an optimizer that lays out its own state dict
# Torch places it on the CPU or the device, by the fused and capturable flags.
_LEFT_TO_TORCH = frozenset({"step"})


class _Hidden:
    """Wraps a value so that `load_state_dict` passes it through: it casts tensors and walks iterables only."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __float__(self) -> float:
        """NAdam and ASGD convert their numbers to tensors while they load."""
        return float(self.value)


def install_checkpoint_hooks(optimizer: Optimizer, rounding: StochasticRounding | None) -> Undo:
    """Make the optimizer's own `state_dict` and `load_state_dict` exact; returns the undo.

    Args:
        optimizer: any whose `state_dict` calls torch's hooks.
        rounding: the noise that is saved, too; None for an optimizer inside a wrapper, which saves it itself.
    """
    existing: dict[Tensor, dict[str, Tensor]] = {}
    loaded: dict[Tensor, dict[str, Tensor]] = {}

    def complete(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        states = {key: gatherable(state) for key, state in state_dict["state"].items()}
        noise = {} if rounding is None else {STATE_KEY: {"rounding": rounding.state_dict()}}
        return {**state_dict, "state": states, **noise}

    def hide(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        saved = state_dict.get(STATE_KEY)
        if saved is not None and rounding is not None:
            rounding.load_state_dict(saved["rounding"])
        # A checkpoint of float32 training has no low halves: those captured when its weights were cast stay.
        existing.clear()
        loaded.clear()
        for key, state in optimizer.state.items():
            if isinstance(key, Tensor):
                existing[key] = {name: state[name] for name in LOW_STATES if name in state}
        saved_keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        owners = dict(zip(saved_keys, (slot.parameter for slot in slots(optimizer)), strict=False))
        states = {}
        for key, state in state_dict["state"].items():
            if key in owners:
                low = {name: as_low(name, value) for name, value in state.items() if name in LOW_STATES}
                state = {name: value for name, value in state.items() if name not in LOW_STATES}
                if low:
                    loaded[owners[key]] = low
                if not state:  # optimizers expect "step" in any state that exists
                    continue
            states[key] = _hide(state)
        return {**state_dict, "state": states}

    def reveal(optimizer: Optimizer) -> None:
        for key, value in optimizer.state.items():
            optimizer.state[key] = _reveal(value, key if isinstance(key, Tensor) else None)
        for parameter in {**existing, **loaded}:
            low = existing.get(parameter, {})
            if parameter in loaded:
                low = written_to(low, loaded[parameter], parameter)
            if low:
                optimizer.state[parameter].update(low)
        existing.clear()
        loaded.clear()

    handles = (
        optimizer.register_state_dict_post_hook(complete),
        optimizer.register_load_state_dict_pre_hook(hide),
        optimizer.register_load_state_dict_post_hook(reveal, prepend=True),
    )

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def as_low(name: str, saved: Tensor) -> Tensor:
    """The low half of a state dict in the dtype that the steps use."""
    return saved.view(torch.int16) if name == LOW_HALF and saved.dtype == torch.bfloat16 else saved


def gatherable(state: Any) -> Any:
    """A state whose sharded low half is viewed as bfloat16: neither gloo nor NCCL gathers 16-bit integers."""
    low = state.get(LOW_HALF) if isinstance(state, dict) else None
    if low is None or not hasattr(low, "to_local"):
        return state
    return {
        **state,
        LOW_HALF: low.view(torch.bfloat16),
    }  # viewed in place: `DTensor.from_local` would move an offloaded one to the device


def _hide(state: Any) -> Any:
    """A parameter's state, with every tensor and iterable hidden that torch would cast or walk (even strings)."""
    if not isinstance(state, dict):
        return state
    hidden = {}
    for name, value in state.items():
        if name in _LEFT_TO_TORCH:
            hidden[name] = value.clone() if isinstance(value, Tensor) else value
        else:
            hidden[name] = _Hidden(value) if isinstance(value, (Tensor, Iterable)) else value
    return hidden


def written_to(low: dict[str, Tensor], saved: dict[str, Tensor], parameter: Tensor) -> dict[str, Tensor]:
    """Saved low halves; those that fit are written into the existing ones, which optimizers may share."""
    written = {}
    for name, value in saved.items():
        own = low.get(name)
        if own is not None and (own.dtype, own.shape, own.device) == (
            value.dtype,
            value.shape,
            parameter.device,
        ):
            written[name] = own.copy_(value)
        else:
            written[name] = _copied(value, parameter.device)
    return written


def _reveal(state: Any, parameter: Tensor | None) -> Any:
    if not isinstance(state, dict):
        return state
    device = None if parameter is None else parameter.device
    return {
        name: _copied(value.value, device) if isinstance(value, _Hidden) else value
        for name, value in state.items()
    }


def _copied(value: Any, device: torch.device | None) -> Any:
    """A copy, because later steps write into it and the loaded state dict belongs to the caller."""
    if isinstance(value, Tensor):
        return value.detach().to(device or value.device, copy=True)
    if isinstance(value, dict):
        return {key: _copied(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item, device) for item in value)
    return deepcopy(value)

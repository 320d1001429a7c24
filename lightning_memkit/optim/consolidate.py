"""Turns a bfloat16 checkpoint into float32 weights and states for float32 training: 4 bytes a value instead of 2.

The weight of a compensated optimizer is a bfloat16 tensor of the module and a low half in the optimizer's
state. The functions here join the two into one float32 tensor: exactly for split, to about 16 bits for kahan.
A checkpoint numbers an optimizer's parameters, so it must also hold their names, which `parameter_names`
gives.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memkit.optim.blocks import local_part
from lightning_memkit.optim.checkpoints import LOW_HALVES_KEY, STATE_KEY, as_low
from lightning_memkit.optim.modes import LOW_STATES, join_low_, split_low_
from lightning_memkit.optim.pieces import slots
from lightning_memkit.optim.quantised import decoded_states
from lightning_memkit.utilities.errors import NoEffectWarning

NAMES_KEY = "memkit_parameter_names"  # the checkpoint key of what `parameter_names` returned
# Of Lightning's WeightAveraging: if present, "state_dict" is the average.
_CURRENT_WEIGHTS = "current_model_state"

_NO_NAMES = (
    "The checkpoint has low halves but no names of the parameters they belong to: it was saved without "
    "PureBF16Precision, or by an earlier version. Resume it with ckpt_path= and save it once more; "
    "outside Lightning, pass the names that parameter_names(module, optimizers) gives."
)

Names = Sequence[Sequence[Sequence[str]]]


def float32_weight(weight: Tensor, state: Mapping[str, Any]) -> Tensor:
    """The float32 value that is trained, as a new tensor: the weight joined with its state's low half."""
    wide = torch.empty_like(weight.detach(), dtype=torch.float32)
    name = next((name for name in LOW_STATES if name in state), None)
    if name is None:
        return wide.copy_(weight.detach())
    low = local_part(as_low(name, state[name])).to(weight.device)
    join_low_(local_part(weight), low, local_part(wide))
    return wide


def set_float32_weight(weight: Tensor, state: Mapping[str, Any], value: Tensor) -> None:
    """Write a float32 value into a weight and, if its optimizer state has one, into the low half.

    Writing the weight alone would leave the old value's low half: an error of up to 0.4 %.
    """
    value = value.detach().to(weight.device, torch.float32)
    name = next((name for name in LOW_STATES if name in state), None)
    if name is None:
        weight.detach().copy_(value)
        return
    low = local_part(state[name]).to(weight.device)
    split_low_(local_part(value), local_part(weight), low)
    local_part(state[name]).copy_(low)  # a no-op unless the states live on another device


def parameter_names(module: nn.Module, optimizers: Iterable[Optimizer]) -> list[list[list[str]]]:
    """For each optimizer, the module's names of each of its parameters, in the order of its state dict.

    A tied parameter has several names; a parameter that is not in the module has none.
    """
    names: dict[Tensor, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [[names.get(slot.parameter, []) for slot in slots(optimizer)] for optimizer in optimizers]


def float32_state_dict(
    module: nn.Module, optimizers: Optimizer | Iterable[Optimizer], device: torch.device | str | None = None
) -> dict[str, Tensor]:
    """The module's state dict with the float32 weights that are trained; 4 bytes a value.

    Every bfloat16 tensor becomes float32, and every tensor is a copy. Tied weights stay one tensor.

    Args:
        module: the module whose state dict is wanted.
        optimizers: one or several, compensated or not.
        device: where the copies live; each on its own device by default.
    """
    if isinstance(optimizers, Optimizer):
        optimizers = [optimizers]
    states: dict[Tensor, Mapping[str, Any]] = {
        slot.parameter: optimizer.state.get(slot.parameter, {})
        for optimizer in optimizers
        for slot in slots(optimizer)
    }
    parameters = dict(module.named_parameters(remove_duplicate=False))
    copies: dict[Any, Tensor] = {}
    weights: dict[str, Any] = {}
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):  # the result of a module's `get_extra_state`
            weights[name] = value
            continue
        owner = parameters.get(name, value)
        if owner not in copies:
            wide = owner.dtype == torch.bfloat16
            copied = float32_weight(owner, states.get(owner, {})) if wide else owner.detach().clone()
            copies[owner] = copied.to(device or copied.device)
        weights[name] = copies[owner]
    return weights


def consolidate_state_dicts(
    weights: Mapping[str, Any], optimizer_states: Sequence[Mapping[str, Any]], names: Names | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """State dicts of a module and its compensated optimizers as float32 training would have saved them.

    Args:
        weights: the module's state dict.
        optimizer_states: the optimizers' state dicts, in the order of ``names``.
        names: what `parameter_names` returned when they were saved. None if the states are keyed by name (as
            sharded training saves them) or have no low halves.

    Returns:
        New dicts; tensors that need no change are shared with the given ones.

    Raises:
        ValueError: the states have low halves, and ``names`` is None or has another number of parameters.
    """
    whole: dict[str, Any] = dict(weights)
    for number, saved in enumerate(optimizer_states):
        for known, state in _with_low_halves(number, saved, names):
            present = [name for name in known if name in weights]
            if present:
                wide = float32_weight(weights[present[0]], state)
                whole.update({name: wide for name in present})
    return _widened(whole, {}), [_plain_state_dict(saved) for saved in optimizer_states]


def consolidate_checkpoint(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """A bfloat16 checkpoint as float32 training would have saved it: `Trainer(precision="32-true")` loads it.

    Weights are the float32 values that were trained, states are float32 (those of 8-bit optimizers of other libraries
    stay as they are), and the entries of memkit's precision are removed. Loops, schedulers, callbacks and
    hyperparameters are kept.

    Args:
        checkpoint: what `Trainer.save_checkpoint` wrote under `PureBF16Precision`, loaded.

    Raises:
        ValueError: it has no weights, or low halves without the names of their parameters.
    """
    if not isinstance(checkpoint.get("state_dict"), Mapping):
        keys = ", ".join(map(repr, checkpoint))
        raise ValueError(
            f"The checkpoint has no 'state_dict' (it has {keys or 'no keys'}); give the file that "
            "Trainer.save_checkpoint wrote, or call consolidate_state_dicts with your own state dicts."
        )
    kept = {key: value for key, value in checkpoint.items() if not _is_names(value)}
    names = next((value[NAMES_KEY] for value in checkpoint.values() if _is_names(value)), None)
    trained_under = _CURRENT_WEIGHTS if _CURRENT_WEIGHTS in checkpoint else "state_dict"
    states = checkpoint.get("optimizer_states", [])
    if not states and any(_is_bfloat16(value) for value in checkpoint[trained_under].values()):
        warnings.warn(
            "The checkpoint has no optimizer states, and low halves are among them: its float32 weights have "
            "only the 8 bits of bfloat16. Save with save_weights_only=False for the rest.",
            stacklevel=2,
        )
    if not any(_is_bfloat16(value) for value in checkpoint[trained_under].values()):
        warnings.warn(
            "The checkpoint has no bfloat16 weight, so there is nothing to consolidate; plain float32 training "
            "loads it as it is.",
            NoEffectWarning,
            stacklevel=2,
        )
    weights, states = consolidate_state_dicts(checkpoint[trained_under], states, names)
    beside = next((value.get(LOW_HALVES_KEY, {}) for value in checkpoint.values() if _is_names(value)), {})
    for name, low in beside.items():  # of weights that no optimizer of the Trainer's steps
        if name in weights:
            weights[name] = float32_weight(checkpoint[trained_under][name], low)
    if "optimizer_states" in kept:
        kept["optimizer_states"] = states
    kept[trained_under] = weights
    if trained_under != "state_dict":
        kept["state_dict"] = _widened(dict(checkpoint["state_dict"]), {})
    return kept


def _with_low_halves(
    optimizer: int, saved: Mapping[str, Any], names: Names | None
) -> Iterator[tuple[Sequence[str], Mapping[str, Any]]]:
    """The names of each parameter that has a low half, and the state that holds it."""
    for key, state in _states_of(saved).items():
        if isinstance(state, Mapping) and any(name in state for name in LOW_STATES):
            yield _names_of(key, optimizer, saved, names), state
    for index, state in saved.get(STATE_KEY, {}).get(LOW_HALVES_KEY, {}).items():  # a wrapper's
        if names is None:
            raise ValueError(_NO_NAMES)
        yield names[optimizer][int(index)], state


def _states_of(saved: Mapping[str, Any]) -> Mapping[Any, Any]:
    """The states by parameter; empty for a wrapper whose state dict is laid out in a way of its own."""
    states = saved.get("state")
    return states if isinstance(states, Mapping) else {}


def _names_of(key: int | str, optimizer: int, saved: Mapping[str, Any], names: Names | None) -> Sequence[str]:
    """The module's names for the parameter under ``key`` in an optimizer's state dict."""
    if isinstance(key, str):
        return [key]
    if names is None:
        raise ValueError(_NO_NAMES)
    # Usually the keys count up; torch's utilities for sharded training number the module's parameters
    # instead.
    keys = [parameter for group in saved["param_groups"] for parameter in group["params"]]
    found = len(names[optimizer]) if optimizer < len(names) else 0
    if found != len(keys):
        raise ValueError(
            f"Optimizer {optimizer} has {len(keys)} parameters and {found} names: state dicts and names are from "
            "different moments; take both when saving."
        )
    return names[optimizer][keys.index(key)]


def _plain_state_dict(saved: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict in float32, without low halves and without the state of memkit's rounding noise."""
    states: dict[Any, Any] = {}
    for key, state in _states_of(saved).items():
        if isinstance(state, Mapping):
            state = {name: value for name, value in state.items() if name not in LOW_STATES}
            if not state:  # a low half only: this parameter has not been stepped yet
                continue
            state = decoded_states(state)
        states[key] = _widened(state, {})
    beside = {key: value for key, value in saved.items() if key not in (STATE_KEY, "state")}
    return {**_widened(beside, {}), **({"state": states} if "state" in saved else {})}


def _widened(value: Any, done: MutableMapping[Any, Tensor]) -> Any:
    """A value with every bfloat16 tensor as float32; a tensor shared by several names stays shared."""
    if isinstance(value, Tensor):
        if value.dtype != torch.bfloat16:
            return value
        place = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride())
        if place not in done:
            done[place] = value.detach().float()
        return done[place]
    if isinstance(value, Mapping):
        return {key: _widened(item, done) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_widened(item, done) for item in value)
    return value


def _is_names(value: Any) -> bool:
    return isinstance(value, Mapping) and NAMES_KEY in value


def _is_bfloat16(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bfloat16

"""Optimizer states in host memory: 0 bytes a parameter on the device between steps, a few buckets during one.

The optimizer stays the user's. A step copies the states of one bucket of parameters after the other to the
device, lets the optimizer step the bucket, and copies the states back. Weights and states are bitwise those
of the same optimizer without offload, from the same gradients. The price is the copies: each state crosses
twice a step.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.memory.pinned import return_pinned
from lightning_memkit.optim.closures import with_closure
from lightning_memkit.optim.compensation import compensation_of
from lightning_memkit.optim.gradient_release import release_of
from lightning_memkit.optim.methods import (
    SLOTS,
    WeakMethod,
    living,
    refuse_closures,
    refuse_sums_over_the_model,
    refuse_zero_redundancy,
    replaced_step,
    stock_step,
)
from lightning_memkit.optim.pieces import slots
from lightning_memkit.optim.shadow import ShadowEngine
from lightning_memkit.optim.state_home import HOME, StateHome, has_own_memory, is_at_home, mapped, tensors_of
from lightning_memkit.utilities.errors import NoEffectWarning

BUCKET_BYTES = 64 << 20
_MARK = "_memkit_offload"


class StateOffload:
    """The handle of an optimizer whose states live in host memory: their size, and the undo.

    Made by `offload_states`. ``state_dict`` returns the states where they are, in host memory.
    """

    def __init__(self, optimizer: Optimizer, home: StateHome) -> None:
        self._optimizer = ref(optimizer)  # weak, since the optimizer owns its offload
        self._home = home
        self._active = True
        self._previous = {name: optimizer.__dict__.get(name) for name in ("step", "load_state_dict")}
        self._stock_step = stock_step(optimizer)
        self._own: dict[str, Any] = {"load_state_dict": WeakMethod(_load_of(self), optimizer)}
        if compensation_of(optimizer) is None and release_of(optimizer) is None:
            self._own["step"] = _make_step(self, optimizer)
        self._settle_hook = optimizer.register_state_dict_pre_hook(lambda _: home.settle())
        optimizer.__dict__.update({**self._own, HOME: home})
        self._take_all_home()

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer whose states are offloaded."""
        return living(self._optimizer)

    def bytes_on_host(self) -> int:
        """Bytes of states in host memory whose parameters are on a device."""
        return sum(
            tensor.nbytes
            for slot in slots(self.optimizer)
            if has_own_memory(slot.parameter) and slot.parameter in self.optimizer.state
            for tensor in tensors_of(self.optimizer.state[slot.parameter])
            if is_at_home(tensor)
        )

    def undo(self, *, move: bool = True) -> None:
        """Restore the optimizer's own step, and move its states back beside the parameters.

        An earlier compensation or release must be undone after this.

        Args:
            move: False leaves the states in host memory, for an optimizer that takes no more steps.
        """
        if not self._active:
            return
        self._active = False
        self._home.settle()
        self._settle_hook.remove()
        optimizer = self._optimizer()
        if optimizer is None:  # exchanged for another one, and gone
            return
        for mark in (_MARK, HOME, SLOTS):
            optimizer.__dict__.pop(mark, None)
        for name, own in self._own.items():
            if optimizer.__dict__.get(name) is not own:
                continue  # replaced since; from now on ours calls the stock step
            if self._previous[name] is None:
                del optimizer.__dict__[name]
            else:
                optimizer.__dict__[name] = self._previous[name]
        for slot in slots(optimizer) if move else ():
            if slot.parameter in optimizer.state:
                state = optimizer.state[slot.parameter]
                state.update(mapped(state, partial(Tensor.to, device=slot.parameter.device)))
        if move and self._home.pin_memory:
            return_pinned()

    def _take_all_home(self) -> None:
        optimizer = self.optimizer
        for slot in slots(optimizer):
            if has_own_memory(slot.parameter) and slot.parameter in optimizer.state:
                state = optimizer.state[slot.parameter]
                for name in state:  # one by one, to free device memory before the next copy
                    state[name] = self._home.take_home(state[name])

    def _load(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Load states to the host: CPU stand-ins replace the parameters, whose device `load_state_dict` would use."""
        self._home.settle()
        optimizer = self.optimizer
        originals = [group["params"] for group in optimizer.param_groups]
        stand_ins = [[_stand_in(parameter) for parameter in group] for group in originals]
        pairs = [pair for both in zip(originals, stand_ins, strict=True) for pair in zip(*both, strict=True)]
        _rename(optimizer, stand_ins, dict(pairs))
        try:
            result = load(*args, **kwargs)
        finally:
            _rename(optimizer, originals, {stand_in: parameter for parameter, stand_in in pairs})
        _place_scalars(optimizer)
        self._take_all_home()
        return result


def offload_states(
    optimizer: Optimizer, *, bucket_bytes: int = BUCKET_BYTES, pin_memory: bool = True
) -> StateOffload:
    """Keep an optimizer's states in host memory; frees 8 bytes a parameter with AdamW in float32, 6 compensated.

    Three buckets of states are on the device during a step, and none between steps. Clipping, schedulers,
    parameter groups and checkpoints work as usual; `load_state_dict` takes no device memory. On devices with
    streams the copies overlap with the computation.

    Args:
        optimizer: any optimizer that steps each parameter by itself, compensated or not.
        bucket_bytes: bytes of states copied together. A parameter with more is a bucket of its own.
        pin_memory: whether to use page-locked host memory, which fast copies need.

    Returns:
        The handle; `StateOffload.undo` moves the states back.

    Raises:
        ValueError: the states are offloaded already, are paged by bitsandbytes, or belong to sharded parameters;
            or the optimizer combines values over the model.
        TypeError: the optimizer's step demands a closure, such as LBFGS's, or is ZeRO-1's.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes} must be 1 or more; 64 MiB is {BUCKET_BYTES}.")
    _refuse(optimizer)
    parameters = [slot.parameter for slot in slots(optimizer)]
    if not any(map(has_own_memory, parameters)):
        devices = sorted({parameter.device.type for parameter in parameters})
        warnings.warn(
            f"The parameters of {type(optimizer).__name__} are on {', '.join(devices) or 'no device'}, which computes "
            "in host memory: its states are there already, and offloading them frees nothing.",
            NoEffectWarning,
            stacklevel=2,
        )
    offload = optimizer.__dict__[_MARK] = StateOffload(optimizer, StateHome(bucket_bytes, pin_memory))
    return offload


def offload_of(optimizer: Optimizer) -> StateOffload | None:
    """The handle of an optimizer whose states are offloaded; None for any other."""
    return optimizer.__dict__.get(_MARK)


def _refuse(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if offload_of(optimizer) is not None:
        raise ValueError(
            f"The states of this {name} are offloaded already; call .undo() on the first handle."
        )
    refuse_zero_redundancy(optimizer, "a step in buckets")
    refuse_closures(optimizer, "a step in buckets")
    refuse_sums_over_the_model(optimizer, "a step in buckets")
    if getattr(optimizer, "is_paged", False):
        raise ValueError(
            f"{name} pages its states between device and host itself; use {name.removeprefix('Paged')}, or don't "
            "offload."
        )
    if any(hasattr(slot.parameter, "to_local") for slot in slots(optimizer)):
        raise ValueError(
            f"The parameters of {name} are sharded (DTensor), and their states can't be offloaded here; use "
            "fully_shard(..., offload_policy=CPUOffloadPolicy())."
        )


def _make_step(offload: StateOffload, optimizer: Optimizer) -> WeakMethod:
    """A step in buckets, for an optimizer that no other engine steps."""
    engine = ShadowEngine.plain()

    def act(optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        if offload._active:
            return engine.step(optimizer, offload._stock_step, closure)
        return with_closure(offload._stock_step, closure)()

    # A later replacement of the step takes ours for the stock step. It may: its engine knows of the states'
    # home, too.
    return replaced_step(optimizer, act, wrapped=True)


def _load_of(offload: StateOffload) -> Callable[..., Any]:
    def load_state_dict(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        previous = offload._previous["load_state_dict"]
        load = previous or partial(type(optimizer).load_state_dict, optimizer)
        return offload._load(load, *args, **kwargs) if offload._active else load(*args, **kwargs)

    return load_state_dict


def _stand_in(parameter: Parameter) -> Parameter:
    """An empty parameter on the CPU, from which `load_state_dict` takes dtype and device."""
    return Parameter(torch.empty(0, dtype=parameter.dtype), requires_grad=parameter.requires_grad)


def _rename(optimizer: Optimizer, params: list[list[Parameter]], names: dict[Any, Parameter]) -> None:
    """Replace the optimizer's parameters, and move the states to the new keys."""
    for group, shown in zip(optimizer.param_groups, params, strict=True):
        group["params"] = shown
    states = [(names.get(key, key), state) for key, state in optimizer.state.items()]
    optimizer.state.clear()
    optimizer.state.update(states)


def _place_scalars(optimizer: Optimizer) -> None:
    """Put scalars where torch's `load_state_dict` would: beside the parameter, the step count only if it must be."""
    for group in optimizer.param_groups:
        count_moves = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() == 0:
                    moves = name != "step" or count_moves
                    # A copy, because later steps write into it and the loaded state dict belongs to the
                    # caller.
                    state[name] = value.to(parameter.device if moves else value.device, copy=True)

"""Adapts bitsandbytes' optimizers: 32-bit states for embeddings; overrides and resume work over bfloat16 weights.

A compensated step puts float32 shadows in the places of an optimizer's parameters. bitsandbytes looks
settings up by parameter id, which a shadow does not have, so the adapter looks them up by place.
"""

import sys
import warnings
from collections.abc import Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.optim.at_risk import at_risk
from lightning_memkit.optim.methods import is_compensated_optimizer
from lightning_memkit.optim.pieces import Slot, slots
from lightning_memkit.optim.state_dtypes import KEEP_FLOAT32
from lightning_memkit.utilities.errors import NoEffectWarning

BLOCK_VALUES = 256  # values that share one scale in bitsandbytes' states
PAGING_DEVICES = ("cuda", "xpu")
PAGED_VALUES = 100_000  # bitsandbytes pages states of at least this many values
_MARK = "_memkit_bitsandbytes"
_WRAPPED_STATE = (
    "__bnb_optimizer_quant_state__"  # where bitsandbytes' state dicts hide tensors from FSDP's gathering
)


def is_bitsandbytes(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one of bitsandbytes' own; never imports bitsandbytes."""
    module = sys.modules.get("bitsandbytes.optim.optimizer")
    return module is not None and isinstance(optimizer, module.Optimizer8bit)


class BitsandbytesAdapter:
    """The handle of an adapted optimizer, made by `adapt_bitsandbytes`: what keeps 32 bits, and the undo."""

    def __init__(self, optimizer: Optimizer) -> None:
        # The optimizer owns its adapter; a strong reference back would make a cycle.
        self._optimizer = ref(optimizer)
        self._kept: dict[Parameter, str] = {}
        self._keeps_at_risk = True
        self._overrides: dict[tuple[int, int], dict[str, Any]] = {}
        self._loaded = False
        self._was_paged: bool = getattr(optimizer, "is_paged", False)
        if self._was_paged and not any(_is_there(device) for device in PAGING_DEVICES):
            _leave_paging(optimizer)
        optimizer.__dict__["get_config"] = self._get_config
        optimizer.__dict__["init_state"] = self._init_state
        optimizer.__dict__["load_state_dict"] = self._load_state_dict
        self._hook = optimizer.register_step_pre_hook(_before_step)

    @property
    def kept(self) -> dict[str, Parameter]:
        """The optimizer's parameters that keep 32-bit states although others have 8-bit ones, by name."""
        optimizer = self._target()
        bits = {slot: self._bits(optimizer, slot) for slot in slots(optimizer)}
        if 8 not in bits.values():
            return {}
        return {
            self._kept.get(slot.parameter, _place(slot)): slot.parameter
            for slot, own in bits.items()
            if own == 32 and slot.parameter.numel() >= optimizer.args.min_8bit_size
        }

    def undo(self) -> None:
        """Restore the optimizer's own behaviour; states that exist stay as they are."""
        optimizer = self._target()
        if optimizer.__dict__.get(_MARK) is not self:
            return
        for name in (_MARK, "get_config", "init_state", "load_state_dict"):
            del optimizer.__dict__[name]
        self._hook.remove()
        optimizer.is_paged = self._was_paged  # pyright: ignore[reportAttributeAccessIssue]

    def _target(self) -> Any:
        optimizer = self._optimizer()
        if optimizer is None:
            raise ReferenceError("The adapted optimizer is gone; keep a reference to it beside the handle.")
        return optimizer

    def _keep(self, parameters: Mapping[Parameter, str], at_risk: bool) -> None:
        # One call with False decides for all later calls.
        self._keeps_at_risk = self._keeps_at_risk and at_risk
        self._kept = {**self._kept, **parameters} if self._keeps_at_risk else {}
        self._refresh(self._target())

    def _bits(self, optimizer: Any, slot: Slot) -> int:
        return self._overrides.get((slot.group, slot.place), {}).get("optim_bits", optimizer.args.optim_bits)

    def _refresh(self, optimizer: Optimizer) -> None:
        """Look up the settings for each place in the groups; a compensated step puts other parameters there."""
        by_user = _overrides_by_user(optimizer)
        self._overrides.clear()
        for slot in slots(optimizer):
            override = dict(by_user.get(id(slot.parameter), {}))
            default = 32 if slot.parameter in self._kept else None
            bits = optimizer.param_groups[slot.group].get("optim_bits", default)
            if bits is not None:
                override.setdefault("optim_bits", _checked_bits(bits))
            if override:
                self._overrides[slot.group, slot.place] = override

    def _get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        optimizer = self._target()
        config = type(optimizer).get_config(optimizer, gindex, pindex, group)
        config.update(self._overrides.get((gindex, pindex), {}))
        return config

    def _init_state(self, group: dict[str, Any], parameter: Parameter, gindex: int, pindex: int) -> None:
        optimizer = self._target()
        type(optimizer).init_state(optimizer, group, parameter, gindex, pindex)
        if self._is_exception(optimizer, gindex, pindex):
            optimizer.state[parameter][KEEP_FLOAT32] = True

    def _is_exception(self, optimizer: Any, gindex: int, pindex: int) -> bool:
        """Whether a parameter has 32-bit states in an 8-bit optimizer."""
        bits = self._overrides.get((gindex, pindex), {}).get("optim_bits")
        return bits == 32 and optimizer.args.optim_bits == 8

    def _load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        # bitsandbytes' own method calls no hooks and casts low halves to the weights' dtype; torch's casts
        # 8-bit states unless a compensation's hooks hide them.
        optimizer = self._target()
        if is_compensated_optimizer(optimizer):
            states = {key: _unwrapped(state) for key, state in state_dict["state"].items()}
            Optimizer.load_state_dict(optimizer, {**state_dict, "state": states})
        else:
            for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
                changed = hook(optimizer, state_dict)
                state_dict = state_dict if changed is None else changed
            type(optimizer).load_state_dict(optimizer, state_dict, *args, **kwargs)
            for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
                hook(optimizer)
        self._loaded = True
        self._refresh(optimizer)  # loading replaced the groups with those of the checkpoint
        for slot in slots(optimizer):
            state = optimizer.state.get(slot.parameter)
            if state and self._bits(optimizer, slot) == 32:
                dequantize_(state)
                if self._is_exception(optimizer, slot.group, slot.place):
                    state[KEEP_FLOAT32] = True


def adapt_bitsandbytes(
    optimizer: Optimizer, module: nn.Module | None = None, *, keep_at_risk: bool = True
) -> BitsandbytesAdapter:
    """Keep 32-bit states for embeddings (6 bytes more for each of their values with AdamW8bit); fix paging and resume.

    - Parameters that `at_risk` finds in the module keep float32 states, even where other states are compact,
      and so do float32 parameters beside bfloat16 ones. ``optim_bits`` in a parameter group (8 or 32) and
      bitsandbytes' own overrides take precedence.
    - bitsandbytes' overrides (`GlobalOptimManager`, `StableEmbedding`) apply to compensated steps, too.
    - Off CUDA and XPU a paged optimizer warns and does not page. Not yet verified on a GPU.
    - A compensated optimizer resumes bit for bit; if a checkpoint holds 8-bit states for parameters that keep
      32 bits, they are widened.

    Nothing is written to bitsandbytes' global manager, so other optimizers are not affected.

    Args:
        optimizer: one of bitsandbytes' optimizers, before its first step.
        module: searched for parameters at risk; if None, only parameter groups and overrides decide.
        keep_at_risk: False gives 8-bit states to every parameter that no group or override decides about,
            also in later calls such as those of `PureBF16Precision` and of the memkit strategy.

    Returns:
        The handle. An optimizer that is already adapted keeps its handle, which adds the newly found
        parameters.

    Raises:
        TypeError: an optimizer of another library.
        ValueError: sharded parameters, or an ``optim_bits`` other than 8 and 32.
    """
    if not is_bitsandbytes(optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} is none of bitsandbytes' optimizers, the only ones that this adapts; "
            "others go to compensate() as they are."
        )
    _refuse_sharded(optimizer)
    kept = at_risk(module) if module is not None and keep_at_risk else {}
    dtypes = {slot.parameter.dtype for slot in slots(optimizer)}
    if keep_at_risk and torch.bfloat16 in dtypes:
        names = {} if module is None else {p: name for name, p in module.named_parameters()}
        for slot in slots(optimizer):
            if slot.parameter.dtype == torch.float32:
                kept.setdefault(slot.parameter, names.get(slot.parameter, _place(slot)))
    adapter = adapter_of(optimizer)
    if adapter is None:
        adapter = optimizer.__dict__[_MARK] = BitsandbytesAdapter(optimizer)
    adapter._keep(kept, keep_at_risk)
    return adapter


def adapter_of(optimizer: Optimizer) -> BitsandbytesAdapter | None:
    """The handle of an adapted optimizer; None for any other."""
    return optimizer.__dict__.get(_MARK)


def dequantize_(state: dict[str, Any]) -> None:
    """Replace bitsandbytes' 8-bit states of one parameter by float32 ones, in place; others stay as they are."""
    for number in "12":
        codes = state.get(f"state{number}")
        if isinstance(codes, Tensor) and codes.dtype == torch.uint8:
            table, scales = state.pop(f"qmap{number}"), state.pop(f"absmax{number}")
            state[f"state{number}"] = _dequantized(codes, table, scales)


def _dequantized(codes: Tensor, table: Tensor, scales: Tensor) -> Tensor:
    if scales.dim() == 2:  # AdEMAMix stacks two moments, each with its own scales
        return torch.stack([_dequantized(*pair) for pair in zip(codes, [table] * 2, scales, strict=True)])
    values = table[codes.flatten().int()]
    return (values * scales.repeat_interleave(BLOCK_VALUES)[: values.numel()]).view(codes.shape)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    adapter = adapter_of(optimizer)
    if adapter is None:
        return
    adapter._refresh(optimizer)
    on = {slot.parameter.device.type for slot in slots(optimizer)}
    if optimizer.is_paged and not on & set(PAGING_DEVICES):  # pyright: ignore[reportAttributeAccessIssue]
        _leave_paging(optimizer)
    elif optimizer.is_paged and adapter._loaded:  # pyright: ignore[reportAttributeAccessIssue]
        _page_again(optimizer)
    adapter._loaded = False


def _page_again(optimizer: Any) -> None:
    """Page the states again that loading put on the device. Not yet verified on a GPU."""
    from bitsandbytes import functional

    for slot in slots(optimizer):
        state = optimizer.state.get(slot.parameter, {})
        for name in ("state1", "state2"):
            loaded = state.get(name)
            if loaded is None or loaded.dtype == torch.bfloat16 or slot.parameter.numel() < PAGED_VALUES:
                continue  # states that the compensation keeps in bfloat16 live on the device
            if slot.parameter.device.type in PAGING_DEVICES and not getattr(loaded, "is_paged", False):
                paged = functional.get_paged(*loaded.shape, dtype=loaded.dtype, device=slot.parameter.device)
                state[name] = paged.copy_(loaded)
                optimizer.page_mng.paged_tensors.append(paged)


def _leave_paging(optimizer: Any) -> None:
    on = ", ".join(sorted({slot.parameter.device.type for slot in slots(optimizer)}))
    optimizer.is_paged = False
    name = type(optimizer).__name__
    warnings.warn(
        f"{name} moves its states between GPU and host memory as needed, which takes CUDA or XPU; its parameters are "
        f"on {on}, so nothing is paged; write {name.removeprefix('Paged')} to choose that.",
        NoEffectWarning,
        stacklevel=2,
    )


def _overrides_by_user(optimizer: Any) -> dict[int, Mapping[str, Any]]:
    """The overrides in bitsandbytes' manager, by parameter id: its own key, which no shadow has."""
    manager = optimizer.mng
    found: dict[int, Mapping[str, Any]] = {
        id(getattr(module, name)): config for module, name, config in manager.module_weight_config_triple
    }
    return {**found, **manager.pid2config}


def _unwrapped(state: Any) -> Any:
    if not isinstance(state, dict) or _WRAPPED_STATE not in state:
        return state
    rest = {name: value for name, value in state.items() if name != _WRAPPED_STATE}
    return {**rest, **state[_WRAPPED_STATE]}


def _checked_bits(bits: Any) -> int:
    if bits not in (8, 32):
        raise ValueError(f"optim_bits={bits!r} of a parameter group is neither 8 nor 32.")
    return bits


def _refuse_sharded(optimizer: Optimizer) -> None:
    if any(hasattr(slot.parameter, "to_local") for slot in slots(optimizer)):
        name = type(optimizer).__name__
        raise ValueError(
            f"{name} steps whole tensors, and these parameters are sharded (DTensor): bitsandbytes has no step for "
            "those. Use torch.optim.AdamW with PureBF16Precision (10 bytes a parameter), or instead of FSDP2 "
            "ZeRO1Strategy or DDP."
        )


def _is_there(device: str) -> bool:
    return getattr(torch, device).is_available()


def _place(slot: Slot) -> str:
    return f"group {slot.group}, parameter {slot.place}"

"""Widens the bfloat16 buffers that an optimizer made before it was compensated; 2 bytes a value more.

Over float32 weights, buffers that ``__init__`` makes from the weights would be float32. They are made so in
place: the tensor objects stay the same, so that everything that refers to one sees the change, and views of
shared memory still share it. A copy of a weight also gets its low half, and a buffer that was filled with one
of the optimizer's options gets that option in float32 instead of its bfloat16 rounding.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.optim.identity import exchange
from lightning_memkit.optim.modes import widen_
from lightning_memkit.optim.own_attributes import contents, own_attributes, own_numbers
from lightning_memkit.optim.pieces import is_compensated, slots
from lightning_memkit.optim.state_dtypes import KEEP_FLOAT32
from lightning_memkit.utilities.patching import Undo

_NAMED_AT_MOST = 6


def widen_own_buffers(optimizer: Optimizer, low_halves: Mapping[Parameter, Tensor]) -> Undo:
    """Make the bfloat16 tensors that an optimizer holds beside its weights float32; 2 bytes a value more.

    Returns:
        The undo, which casts those that are still alive back to bfloat16.
    """
    found, views = _held(optimizer)
    if views:
        warnings.warn(
            f"{type(optimizer).__name__} holds views of its bfloat16 weights' memory ({_listed(views)}): what it "
            "writes there is lost by a compensated step, which works on float32 weights. Let it use the parameters, "
            "or train in float32 (precision='32-true').",
            stacklevel=4,
        )
    memories: defaultdict[int, list[Tensor]] = defaultdict(list)
    for tensor in found:
        memories[tensor.untyped_storage()._cdata].append(tensor)
    options = _options(optimizer)
    parameters = [slot.parameter for slot in slots(optimizer) if is_compensated(slot.parameter)]
    with torch.no_grad():
        for tensors in memories.values():
            if len(tensors) == 1 and tensors[0]._base is None:
                _become(tensors[0], _float32_of(tensors[0], parameters, low_halves, options))
            else:
                _widen_memory(tensors)
        _complete_copies(optimizer, parameters, low_halves)
    widened = [ref(tensor) for tensor in found]

    def undo() -> None:
        with torch.no_grad():
            for tensor in (reference() for reference in widened):
                if tensor is not None and tensor.dtype == torch.float32:
                    exchange(tensor, tensor.to(torch.bfloat16))

    return undo


def restore_filled_states(optimizer: Optimizer) -> None:
    """Make states that were filled with an option (Adagrad's ``initial_accumulator_value``) hold it in float32."""
    options = _options(optimizer)
    for slot in slots(optimizer):
        state = optimizer.state.get(slot.parameter, {})
        for name, value in state.items() if is_compensated(slot.parameter) else ():
            if (
                isinstance(value, Tensor)
                and value.dtype == torch.bfloat16
                and value.shape == slot.parameter.shape
            ):
                option = _option_that_fills(value, options)
                if option is not None:
                    wide = torch.empty_like(value, dtype=torch.float32)
                    state[name] = wide.fill_(option)


def warn_of_own_values(optimizer: Optimizer) -> None:
    """Warn of values kept outside the state, which the float32 stand-ins of sharded parameters can't find."""
    names = own_values_by_parameter(optimizer)
    if names:
        warnings.warn(
            f"{type(optimizer).__name__} keeps {', '.join(names)} outside of its state, and its parameters are "
            "sharded (DTensor): a compensated bfloat16 step shows it float32 stand-ins for them, which such lookups "
            "and buffers don't know, and the result may differ. Keep them in self.state[parameter], or train in "
            "float32 (precision='32-true').",
            stacklevel=3,
        )


def own_values_by_parameter(optimizer: Optimizer) -> list[str]:
    """The names of the optimizer's attributes that may refer to its parameters outside the parameter groups."""
    names = []
    for name, value in own_attributes(optimizer).items():
        if any(isinstance(item, (Tensor, dict)) for _, item in contents(value, name, set())):
            names.append(f"self.{name}")
    return names


def _held(optimizer: Optimizer) -> tuple[list[Tensor], list[str]]:
    """The bfloat16 tensors that an optimizer holds, and the names of those that are views of weights."""
    parameters = [slot.parameter for slot in slots(optimizer)]
    weights = {parameter.untyped_storage()._cdata for parameter in parameters if is_compensated(parameter)}
    seen = {id(parameter) for parameter in parameters}
    found, views = [], []
    for path, item in _everything(optimizer, seen):
        if (
            not isinstance(item, Tensor)
            or type(item) not in (Tensor, Parameter)
            or item.layout != torch.strided
        ):
            continue
        if item.dtype != torch.bfloat16:
            continue
        if item.untyped_storage()._cdata in weights:
            views.append(path)
        elif item.grad_fn is None:
            found.append(item)
    return found, views


def _everything(optimizer: Optimizer, seen: set[int]) -> Iterator[tuple[str, Any]]:
    for key, value in optimizer.state.items():
        if not (isinstance(value, dict) and value.get(KEEP_FLOAT32)):
            yield from contents(value, "self.state[...]" if isinstance(key, Tensor) else "self.state", seen)
    for place, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                yield from contents(value, f"self.param_groups[{place}][{name!r}]", seen)
        for parameter in group["params"]:
            for name, value in vars(parameter).items():
                if isinstance(value, Tensor):
                    yield from contents(value, f"parameter.{name}", seen)
    for name, value in own_attributes(optimizer).items():
        yield from contents(value, f"self.{name}", seen)


def _complete_copies(
    optimizer: Optimizer, parameters: list[Parameter], low_halves: Mapping[Parameter, Tensor]
) -> None:
    """Add the low halves to float32 tensors that are copies of the bfloat16 weights (master weights, a start)."""
    by_shape: defaultdict[torch.Size, list[Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter in low_halves:
            by_shape[parameter.shape].append(parameter)
    for _, item in _everything(optimizer, {id(slot.parameter) for slot in slots(optimizer)}):
        if type(item) not in (Tensor, Parameter) or item.dtype != torch.float32 or item.grad_fn is not None:
            continue
        for parameter in by_shape.get(item.shape, ()):
            low = low_halves[parameter]
            if item.device == parameter.device and torch.equal(item, parameter.float()):
                widen_(parameter.detach(), low.to(parameter.device), item.detach())
                break


def _float32_of(
    tensor: Tensor,
    parameters: list[Parameter],
    low_halves: Mapping[Parameter, Tensor],
    options: list[float],
) -> Tensor:
    """The buffer as it would be if it had been made from float32 weights."""
    wide = tensor.float()
    option = _option_that_fills(tensor, options)
    if option is not None:
        return wide.fill_(option)
    for parameter in parameters:
        low = low_halves.get(parameter)
        alike = low is not None and tensor.shape == parameter.shape and tensor.device == parameter.device
        if alike and low is not None and torch.equal(tensor, parameter):
            widen_(parameter.detach(), low.to(parameter.device), wide)
            break
    return wide


def _option_that_fills(tensor: Tensor, options: list[float]) -> float | None:
    """The option that every value of a tensor equals after rounding to bfloat16; None if none or several do."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue]
    if local.numel() == 0:
        return None
    value = local.flatten()[0]
    if not bool((local == value).all()):
        return None
    fitting = {
        option for option in options if float(torch.tensor(option, dtype=torch.bfloat16)) == float(value)
    }
    return fitting.pop() if len(fitting) == 1 else None


def _options(optimizer: Optimizer) -> list[float]:
    numbers = [own_numbers(optimizer), optimizer.defaults, *optimizer.param_groups]
    return [
        float(value)
        for each in numbers
        for value in each.values()
        if isinstance(value, float) and value == value
    ]


def _widen_memory(tensors: list[Tensor]) -> None:
    """Widen tensors that share one memory, so that they share one float32 memory afterwards."""
    first = tensors[0]
    storage = first.untyped_storage()
    whole = torch.empty(0, dtype=first.dtype, device=first.device).set_(storage)
    wide = whole.float()
    for tensor in tensors:
        _become(tensor, wide.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))


def _become(tensor: Tensor, wide: Tensor) -> None:
    if tensor.requires_grad:
        wide.requires_grad_()
    exchange(tensor, Parameter(wide, tensor.requires_grad) if isinstance(tensor, Parameter) else wide)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
    return ", ".join(names[:_NAMED_AT_MOST]) + more

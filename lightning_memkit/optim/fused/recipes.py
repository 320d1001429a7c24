"""Which parameters of which optimizers a fused step can take, and the rule that their step follows.

Only exact classes count: a subclass may mean something else by its step. What is left over (another class,
`amsgrad`, a learning rate on an accelerator, states in another form after a resume) is stepped by the
optimizer itself, on shadows.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memkit.optim.blocks import first_element, flat_views, local_part
from lightning_memkit.optim.fused.operands import SGD, AdamW, Lion, Operand, Rule
from lightning_memkit.optim.modes import LOW_STATES, Mode, low_state_of
from lightning_memkit.optim.pieces import Slot

State = dict[str, Any]
Group = Mapping[str, Any]
Numbers = tuple[float, ...]

_DEVICES = ("cpu", "cuda")
_COUNT = "step"


def take(
    optimizer: Optimizer, mode: Mode, ready: Sequence[Slot]
) -> tuple[dict[Rule, list[Operand]], list[Slot]]:
    """Sort parameters into those that a fused step takes, by their rule, and the others.

    States of those taken that don't exist yet are made (compact: bfloat16), and their step counts advance.

    Args:
        optimizer: any.
        mode: what keeps the bits that bfloat16 lacks.
        ready: bfloat16 parameters that have their gradients.
    """
    recipe = _RECIPES.get(f"{type(optimizer).__module__}.{type(optimizer).__qualname__}")
    if recipe is None or getattr(optimizer, "grad_scale", None) is not None:
        return {}, list(ready)
    numbers_of, rule_of = recipe
    numbers: dict[int, Numbers | None] = {}
    taken: defaultdict[Rule, list[Operand]] = defaultdict(list)
    others: list[Slot] = []
    for slot in ready:
        if slot.group not in numbers:
            numbers[slot.group] = numbers_of(optimizer, optimizer.param_groups[slot.group])
        known = numbers[slot.group]
        state: State = optimizer.state[slot.parameter] if slot.parameter in optimizer.state else {}
        rule = None if known is None else rule_of(known, optimizer.param_groups[slot.group], state)
        operand = None if rule is None else _operand(rule, mode, slot, state)
        if rule is None or operand is None:
            others.append(slot)
            continue
        optimizer.state[slot.parameter] = state
        taken[rule].append(operand)
    return dict(taken), others


def _operand(rule: Rule, mode: Mode, slot: Slot, state: State) -> Operand | None:
    """The tensors of a parameter, its states made where they lack; None where they have another form."""
    parameter, gradient = slot.parameter, slot.parameter.grad
    assert gradient is not None
    wanted = _wanted_states(rule, mode)
    if (
        parameter.device.type not in _DEVICES
        or parameter.dim() == 0  # scalars keep float32 moments
        or gradient.dtype not in (torch.bfloat16, torch.float32)
        or any(name in state and name not in wanted for name in LOW_STATES)  # saved in another mode
        or not all(_fits(state.get(name), dtype, parameter) for name, dtype in wanted.items())
    ):
        return None
    missing = [name for name in wanted if state.get(name) is None]
    made = {name: torch.zeros_like(parameter, dtype=wanted[name]) for name in missing}
    tensors = [local_part(made[name] if name in made else state[name]) for name in wanted]
    views = flat_views(local_part(parameter), local_part(gradient), *tensors)
    if views is None:
        return None
    state.update(made)
    if isinstance(rule, AdamW):
        # The count stays on the host: reading it from a device would wait for the device, once a parameter.
        count = state.get(_COUNT)
        if isinstance(count, Tensor) and count.device.type == "cpu":
            count.fill_(rule.step)
        else:
            state[_COUNT] = torch.tensor(float(rule.step))
    flat = dict(zip(wanted, views[2:], strict=True))
    return Operand(
        index=slot.index,
        weight=views[0],
        low=flat.get(low_state_of(mode) or ""),
        gradient=views[1],
        first=flat.get(rule.first_name),
        second=flat.get(rule.second_name),
        start=first_element(parameter),
    )


@lru_cache(maxsize=16)
def _wanted_states(rule: Rule, mode: Mode) -> dict[str, torch.dtype]:
    """The tensors that a step keeps, and their dtypes."""
    wanted: dict[str, torch.dtype] = {}
    if not (isinstance(rule, SGD) and rule.momentum == 0):
        wanted[rule.first_name] = torch.bfloat16
    if rule.second_name:
        wanted[rule.second_name] = torch.bfloat16
    low = low_state_of(mode)
    if low is not None:
        wanted[low] = torch.int16 if mode == "split" else torch.bfloat16
    return wanted


def _fits(value: Any, dtype: torch.dtype, parameter: Tensor) -> bool:
    if value is None:
        return True
    return (
        isinstance(value, Tensor)
        and value.dtype == dtype
        and value.shape == parameter.shape
        and value.device == parameter.device
    )


def _numbers(*values: Any) -> Numbers | None:
    """Python numbers, also of tensors on the CPU; None where reading one would wait for a device."""
    if any(isinstance(value, Tensor) and value.device.type != "cpu" for value in values):
        return None
    return tuple(float(value) for value in values)


def _adamw_numbers(_: Optimizer, group: Group) -> Numbers | None:
    if group.get("amsgrad") or group.get("capturable"):
        return None
    return _numbers(group["lr"], *group["betas"], group["eps"], group["weight_decay"])


def _adamw(numbers: Numbers, group: Group, state: State) -> Rule:
    learning_rate, beta1, beta2, eps, weight_decay = numbers
    return AdamW(
        learning_rate=learning_rate,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=bool(group.get("decoupled_weight_decay")),
        step=int(state.get(_COUNT, 0)) + 1,
        maximize=bool(group.get("maximize")),
    )


def _sgd_numbers(_: Optimizer, group: Group) -> Numbers | None:
    return _numbers(group["lr"], group["momentum"], group["dampening"], group["weight_decay"])


def _sgd(numbers: Numbers, group: Group, state: State) -> Rule:
    learning_rate, momentum, dampening, weight_decay = numbers
    return SGD(
        learning_rate=learning_rate,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=bool(group["nesterov"]),
        first_step=momentum != 0 and state.get("momentum_buffer") is None,
        maximize=bool(group.get("maximize")),
    )


def _lion_numbers(optimizer: Any, group: Group) -> Numbers | None:
    decay = group["weight_decay"] / optimizer._init_lr if optimizer.decoupled_wd else group["weight_decay"]
    return _numbers(group["lr"], *group["betas"], decay)


def _lion(numbers: Numbers, _: Group, __: State) -> Rule:
    learning_rate, beta1, beta2, weight_decay = numbers
    return Lion(learning_rate=learning_rate, beta1=beta1, beta2=beta2, weight_decay=weight_decay)


_Recipe = tuple[Callable[[Optimizer, Group], "Numbers | None"], Callable[[Numbers, Group, State], Rule]]
_RECIPES: dict[str, _Recipe] = {
    "torch.optim.adamw.AdamW": (_adamw_numbers, _adamw),
    "torch.optim.adam.Adam": (_adamw_numbers, _adamw),
    "torch.optim.sgd.SGD": (_sgd_numbers, _sgd),
    "lion_pytorch.lion_pytorch.Lion": (_lion_numbers, _lion),
}

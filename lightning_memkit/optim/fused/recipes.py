"""Which parameters of which optimizers a fused step can take, and the rule that their step follows.

Only exact classes count: a subclass may mean something else by its step. What is left over (another class,
`amsgrad`, a learning rate on an accelerator, states in another form after a resume) is stepped by the
optimizer itself, on shadows.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memkit.optim import native
from lightning_memkit.optim.blocks import first_element, flat_views, is_sharded, local_part
from lightning_memkit.optim.fused.operands import SGD, AdamW, Lion, Operand, Rule
from lightning_memkit.optim.modes import LOW_STATES, Mode, low_state_of
from lightning_memkit.optim.pieces import Slot

State = dict[str, Any]
Group = Mapping[str, Any]
Numbers = tuple[float, ...]

_DEVICES = ("cpu", "cuda")
_GRADIENTS = (torch.bfloat16, torch.float32)
_COUNT = "step"
_ONE = torch.tensor(1.0)
_seats: "WeakKeyDictionary[Optimizer, dict[Mode, dict[int, _Seat]]]" = WeakKeyDictionary()


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
    with torch.no_grad():  # shards of DTensors cost a node of the graph each, elsewhere
        return _Taking(optimizer, mode, recipe).take(ready)


class _Seat:
    """What was found to fit a fused step, so that the next one looks at identities only; keeps no tensor alive.

    Args:
        parameter: whose seat it is.
        states: its states by their name, as the optimizer has them.
    """

    __slots__ = ("is_contiguous", "is_sharded", "names", "parameter", "places", "start", "states")

    def __init__(self, parameter: Tensor, states: Mapping[str, Tensor]) -> None:
        self.parameter, self.names = ref(parameter), tuple(states)
        self.states = tuple((name, ref(value)) for name, value in states.items())
        self.start, self.is_sharded = first_element(parameter), is_sharded(parameter)
        local = self._local([parameter, *states.values()])
        self.places = [native.address(tensor) for tensor in local]
        self.is_contiguous = all(tensor.is_contiguous() for tensor in local[1:])

    def tensors(self, parameter: Tensor, state: State, names: tuple[str, ...]) -> list[Tensor] | None:
        """What this process holds of the parameter and its states, where nothing was replaced or moved since."""
        if self.parameter() is not parameter or self.names != names:
            return None
        found = [parameter]
        for name, known in self.states:
            value = state.get(name)
            if value is None or value is not known():
                return None
            found.append(value)
        found = self._local(found)
        # Writing to `.data` leaves a tensor what it is, elsewhere, of another dtype or on another device.
        return found if [native.address(tensor) for tensor in found] == self.places else None

    def _local(self, tensors: list[Tensor]) -> list[Tensor]:
        return [local_part(tensor) for tensor in tensors] if self.is_sharded else tensors


class _Taking:
    """One step's sorting."""

    def __init__(self, optimizer: Optimizer, mode: Mode, recipe: "_Recipe") -> None:
        self._optimizer, self._mode, self._recipe = optimizer, mode, recipe
        self._low = low_state_of(mode)
        self._seats = _seats.setdefault(optimizer, {}).setdefault(mode, {})
        self._numbers = [recipe.numbers(optimizer, group) for group in optimizer.param_groups]
        # By group and what states say of the step: the rule, and the names of the states that it needs.
        self._rules: dict[tuple[int, int], tuple[Rule, tuple[str, ...]]] = {}
        self._counts: list[Tensor] = []

    def take(self, ready: Sequence[Slot]) -> tuple[dict[Rule, list[Operand]], list[Slot]]:
        of_rule: defaultdict[tuple[int, int], list[Operand]] = defaultdict(list)
        others: list[Slot] = []
        states, groups, stage_of = self._optimizer.state, self._optimizer.param_groups, self._recipe.stage
        for slot in ready:
            numbers, operand = self._numbers[slot.group], None
            if numbers is not None:
                state: State = states.get(slot.parameter) or {}
                key = slot.group, stage_of(state)
                known = self._rules.get(key)
                if known is None:
                    rule = self._recipe.rule(numbers, groups[slot.group], key[1])
                    known = self._rules[key] = rule, tuple(_wanted_states(rule, self._mode))
                operand = self._operand(*known, slot, state)
                if operand is not None:
                    states[slot.parameter] = state
                    of_rule[key].append(operand)
            if operand is None:
                others.append(slot)
        if self._counts:
            torch._foreach_add_(self._counts, _ONE, alpha=1.0)  # a number would be made a tensor for each
        taken: defaultdict[Rule, list[Operand]] = defaultdict(list)
        for key, operands in of_rule.items():
            taken[self._rules[key][0]] += operands
        return dict(taken), others

    def _operand(self, rule: Rule, names: tuple[str, ...], slot: Slot, state: State) -> Operand | None:
        """The tensors of a parameter, its states made where they lack; None where they have another form."""
        parameter, gradient = slot.parameter, slot.parameter.grad
        assert gradient is not None
        if gradient.dtype not in _GRADIENTS:
            return None
        seat = self._seats.get(slot.index)
        tensors = None if seat is None else seat.tensors(parameter, state, names)
        if seat is None or tensors is None:
            seat = self._seated(rule, parameter, gradient, state)
            tensors = None if seat is None else seat.tensors(parameter, state, names)
            if seat is None or tensors is None:
                return None
            self._seats[slot.index] = seat
        if seat.is_sharded:
            gradient = local_part(gradient)
        weight, *found = tensors
        if not (seat.is_contiguous and gradient.is_contiguous() and weight.is_contiguous()):
            views = flat_views(weight, gradient, *found)
            if views is None:
                return None
            weight, gradient, *found = views
        if self._recipe.counts:
            self._counts.append(_on_the_host(state))
        low = found.pop() if self._low else None
        first = found[0] if found else None
        second = found[1] if len(found) > 1 else None
        return Operand(
            index=slot.index,
            weight=weight,
            low=low,
            gradient=gradient,
            first=first,
            second=second,
            start=seat.start,
        )

    def _seated(self, rule: Rule, parameter: Tensor, gradient: Tensor, state: State) -> _Seat | None:
        """A seat of a parameter, whose states are made where they lack; None where they have another form."""
        wanted = _wanted_states(rule, self._mode)
        if parameter.device.type not in _DEVICES or parameter.dim() == 0:  # scalars keep float32 moments
            return None
        if any(name in state and name not in wanted for name in LOW_STATES):  # saved in another mode
            return None
        if not all(_fits(state.get(name), dtype, parameter) for name, dtype in wanted.items()):
            return None
        found = {
            name: torch.zeros_like(parameter, dtype=dtype) if state.get(name) is None else state[name]
            for name, dtype in wanted.items()
        }
        if flat_views(*(local_part(tensor) for tensor in (parameter, gradient, *found.values()))) is None:
            return None
        state.update(found)
        return _Seat(parameter, found)


def _on_the_host(state: State) -> Tensor:
    """The count of steps: reading it from a device would wait for the device, once a parameter."""
    count = state.get(_COUNT)
    if isinstance(count, Tensor) and count.is_cpu:
        return count
    state[_COUNT] = torch.tensor(float(state.get(_COUNT, 0)))
    return state[_COUNT]


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


def _next_step(state: State) -> int:
    count = state.get(_COUNT, 0)
    return int(count.item() if isinstance(count, Tensor) else count) + 1


def _has_no_momentum(state: State) -> int:
    return int(state.get(SGD.first_name) is None)


def _is_any(state: State) -> int:
    return 0


def _adamw(numbers: Numbers, group: Group, step: int) -> Rule:
    learning_rate, beta1, beta2, eps, weight_decay = numbers
    return AdamW(
        learning_rate=learning_rate,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=bool(group.get("decoupled_weight_decay")),
        step=step,
        maximize=bool(group.get("maximize")),
    )


def _sgd_numbers(_: Optimizer, group: Group) -> Numbers | None:
    return _numbers(group["lr"], group["momentum"], group["dampening"], group["weight_decay"])


def _sgd(numbers: Numbers, group: Group, has_no_momentum: int) -> Rule:
    learning_rate, momentum, dampening, weight_decay = numbers
    return SGD(
        learning_rate=learning_rate,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=bool(group["nesterov"]),
        first_step=momentum != 0 and bool(has_no_momentum),
        maximize=bool(group.get("maximize")),
    )


def _lion_numbers(optimizer: Any, group: Group) -> Numbers | None:
    decay = group["weight_decay"] / optimizer._init_lr if optimizer.decoupled_wd else group["weight_decay"]
    return _numbers(group["lr"], *group["betas"], decay)


def _lion(numbers: Numbers, _: Group, __: int) -> Rule:
    learning_rate, beta1, beta2, weight_decay = numbers
    return Lion(learning_rate=learning_rate, beta1=beta1, beta2=beta2, weight_decay=weight_decay)


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """How a class of optimizers is stepped by a kernel.

    Args:
        numbers: those of a group; None where it asks for what no kernel does.
        stage: what a parameter's states say of the step.
        rule: of a group's numbers and of the stage.
        counts: the states count steps.
    """

    numbers: Callable[[Optimizer, Group], "Numbers | None"]
    stage: Callable[[State], int]
    rule: Callable[[Numbers, Group, int], Rule]
    counts: bool = False


_RECIPES = {
    "torch.optim.adamw.AdamW": _Recipe(numbers=_adamw_numbers, stage=_next_step, rule=_adamw, counts=True),
    "torch.optim.adam.Adam": _Recipe(numbers=_adamw_numbers, stage=_next_step, rule=_adamw, counts=True),
    "torch.optim.sgd.SGD": _Recipe(numbers=_sgd_numbers, stage=_has_no_momentum, rule=_sgd),
    "lion_pytorch.lion_pytorch.Lion": _Recipe(numbers=_lion_numbers, stage=_is_any, rule=_lion),
}

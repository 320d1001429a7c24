"""The step of any optimizer on float32 shadows of bfloat16 weights, bucket by bucket.

The user's optimizer, its parameters and its group dicts stay what they are. For each bucket the engine builds
float32 shadow parameters, shows the optimizer nothing but them, calls its own step, and writes weights and
states back. The update, weight decay included, therefore happens in float32 on the compensated value.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.optim.blocks import local_part
from lightning_memkit.optim.kahan import COMPENSATION, kahan_join_, kahan_split_
from lightning_memkit.optim.split import LOW_HALF, join_, split_
from lightning_memkit.optim.state_dtypes import storage_of
from lightning_memkit.optim.stochastic_rounding import StochasticRounding

Mode = Literal["kahan", "split", "stochastic", "none"]
States = Literal["compact", "exact"]
LOW_STATES = (LOW_HALF, COMPENSATION)
_BYTES_IN_FLIGHT = 16  # float32 weight, gradient and two moments of one parameter


@dataclass(frozen=True)
class Slot:
    """Where a parameter stands: its group, its place in it, and its index over all groups."""

    group: int
    place: int
    index: int
    parameter: Parameter


def slots(optimizer: Optimizer) -> Iterator[Slot]:
    """All parameters of an optimizer in order; groups added later come last, so earlier indices stay."""
    index = 0
    for group_index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            yield Slot(group_index, place, index, parameter)
            index += 1


def is_compensated(parameter: Tensor) -> bool:
    """Whether the engine steps a parameter on a shadow; every other dtype is stepped as it is."""
    return parameter.dtype == torch.bfloat16


def group_scalars(optimizer: Optimizer) -> list[dict[str, Any]]:
    """A copy of every group's entries but its parameters."""
    return [
        {key: deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def restore_group_scalars(optimizer: Optimizer, scalars: list[dict[str, Any]]) -> None:
    """Put `group_scalars` back into the same dicts."""
    for group, kept in zip(optimizer.param_groups, scalars, strict=True):
        for key in group.keys() - kept.keys() - {"params"}:
            del group[key]
        group.update(deepcopy(kept))


class ShadowEngine:
    """Steps an optimizer's bfloat16 parameters in float32.

    Args:
        mode: what keeps the bits that bfloat16 lacks.
        states: ``"compact"`` keeps moments in bfloat16, ``"exact"`` in float32.
        rounding: the noise of stochastic rounding.
        bucket_bytes: float32 temporaries at a time; a parameter larger than that is a bucket of its own.
    """

    def __init__(self, mode: Mode, states: States, rounding: StochasticRounding, bucket_bytes: int) -> None:
        self.mode: Mode = mode
        self.states: States = states
        self.rounding = rounding
        self.bucket_bytes = bucket_bytes
        # What the optimizer sees in the place of parameters that are not in the bucket: it has no gradient,
        # so it is passed over, and the places of the others, which some optimizers go by, stay.
        self._absent = Parameter(torch.empty(0))

    def step(self, optimizer: Optimizer, stock_step: Callable[[], object]) -> None:
        """One optimizer step, from the gradients as they stand."""
        plain: list[Slot] = []
        buckets: list[list[Slot]] = [[]]
        in_bucket = 0
        for slot in slots(optimizer):
            if slot.parameter.grad is None:
                continue
            if not is_compensated(slot.parameter):
                plain.append(slot)
                continue
            self._refuse_sparse(slot.parameter)
            size = _BYTES_IN_FLIGHT * local_part(slot.parameter).numel()
            if buckets[-1] and in_bucket + size > self.bucket_bytes:
                buckets.append([])
                in_bucket = 0
            buckets[-1].append(slot)
            in_bucket += size
        before = group_scalars(optimizer) if len(buckets) > 1 else []
        self.rounding.begin_step()
        for number, bucket in enumerate(buckets):
            if number > 0:  # scalars of a group advance once a step, not once a bucket
                restore_group_scalars(optimizer, before)
            self._step_bucket(optimizer, bucket, plain if number == 0 else [], stock_step)
        self.rounding.end_step()

    def _step_bucket(
        self, optimizer: Optimizer, bucket: list[Slot], plain: list[Slot], stock_step: Callable[[], object]
    ) -> None:
        full_state: Mapping[Any, Any] = optimizer.state
        seen_state: defaultdict[Any, Any] = defaultdict(dict)
        seen_state.update({key: value for key, value in full_state.items() if not isinstance(key, Tensor)})
        seen_params = [[self._absent] * len(group["params"]) for group in optimizer.param_groups]
        for slot in plain:
            seen_params[slot.group][slot.place] = slot.parameter
            if slot.parameter in full_state:
                seen_state[slot.parameter] = full_state[slot.parameter]
        shadows: list[Parameter] = []
        for slot in bucket:
            state = full_state[slot.parameter] if slot.parameter in full_state else {}
            shadow = self._shadow(slot.parameter, state)
            shadows.append(shadow)
            seen_params[slot.group][slot.place] = shadow
            seen_state[shadow] = _widened(state, slot.parameter)
        with _showing(optimizer, seen_state, seen_params):
            stock_step()
        for slot, shadow in zip(bucket, shadows, strict=True):
            shadow.grad = None
            self._write_back(optimizer, slot, shadow, seen_state.pop(shadow, {}))
        for slot in plain:
            if slot.parameter in seen_state:
                optimizer.state[slot.parameter] = seen_state.pop(slot.parameter)
        for key in [key for key in seen_state if not isinstance(key, Tensor)]:
            optimizer.state[key] = seen_state[key]

    def _shadow(self, parameter: Parameter, state: Mapping[str, Any]) -> Parameter:
        # Which low half is there decides, not the mode: a checkpoint may come from another mode.
        weight = torch.empty_like(parameter.detach(), dtype=torch.float32)
        high, out = local_part(parameter), local_part(weight)
        if LOW_HALF in state:
            join_(high, local_part(state[LOW_HALF]), out)
        elif COMPENSATION in state:
            kahan_join_(high, local_part(state[COMPENSATION]), out)
        else:
            out.copy_(high)
        shadow = Parameter(weight)
        assert parameter.grad is not None
        shadow.grad = parameter.grad.detach().to(torch.float32)
        return shadow

    def _write_back(
        self, optimizer: Optimizer, slot: Slot, shadow: Parameter, stepped: dict[str, Any]
    ) -> None:
        parameter, group = slot.parameter, optimizer.param_groups[slot.group]
        state = optimizer.state[parameter]
        if self.states == "compact":
            for name, value in stepped.items():
                stepped[name] = self._stored(name, value, stepped, group, state.get(name), slot)
        low = {name: state[name] for name in LOW_STATES if name in state}
        state.clear()
        state.update(stepped)
        state.update(self._narrowed(slot, shadow, low))

    def _narrowed(self, slot: Slot, shadow: Parameter, low: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Write the float32 shadow into the parameter; returns the state that holds what was left over."""
        parameter = slot.parameter.detach()
        master, high = local_part(shadow), local_part(parameter)
        if self.mode == "split":
            half = _reuse(low.get(LOW_HALF), parameter, torch.int16)
            split_(master, high, local_part(half))
            return {LOW_HALF: half}
        if self.mode == "kahan":
            rest = _reuse(low.get(COMPENSATION), parameter, torch.bfloat16)
            kahan_split_(master, high, local_part(rest))
            return {COMPENSATION: rest}
        if self.mode == "stochastic":
            self.rounding.round_(master, high, (slot.index, "weight"))
        else:
            high.copy_(master)
        return {}

    def _stored(
        self,
        name: str,
        value: Any,
        stepped: Mapping[str, Any],
        group: Mapping[str, Any],
        previous: Any,
        slot: Slot,
    ) -> Any:
        storage = storage_of(name, value, stepped, group, slot.parameter)
        if storage == "keep":
            return value
        stored = _reuse(previous, value, torch.bfloat16)
        if storage == "nearest":
            local_part(stored).copy_(local_part(value))
        else:
            self.rounding.round_(local_part(value), local_part(stored), (slot.index, name))
        return stored

    def _refuse_sparse(self, parameter: Parameter) -> None:
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise RuntimeError(
                f"The gradient of a bfloat16 parameter of shape {tuple(parameter.shape)} is sparse: compensated "
                "steps take dense gradients; build the module with sparse=False, or keep it in float32 "
                "(fp32_exceptions=) and give it an optimizer for sparse gradients."
            )


def _widened(state: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
    """What the stock step sees as a parameter's state: moments in float32, no low half."""
    return {
        name: value.to(torch.float32)
        if isinstance(value, Tensor) and value.dtype == torch.bfloat16 and value.shape == like.shape
        else value
        for name, value in state.items()
        if name not in LOW_STATES
    }


def _reuse(previous: Any, like: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor to write to: the one of the last step where it fits."""
    if isinstance(previous, Tensor) and previous.dtype == dtype and previous.shape == like.shape:
        return previous
    return torch.empty_like(like, dtype=dtype)


@contextmanager
def _showing(optimizer: Optimizer, state: Any, params: list[list[Parameter]]) -> Iterator[None]:
    """Let the optimizer see other states, parameters and no hooks of its own while it steps."""
    full_state = optimizer.state
    full_params = [group["params"] for group in optimizer.param_groups]
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer.state = state
    for group, shown in zip(optimizer.param_groups, params, strict=True):
        group["params"] = shown
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = (
        type(hooks[0])(),
        type(hooks[1])(),
    )
    try:
        yield
    finally:
        optimizer.state = full_state
        for group, params_of_group in zip(optimizer.param_groups, full_params, strict=True):
            group["params"] = params_of_group
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks

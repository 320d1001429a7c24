"""`train()` and `eval()` of ScheduleFree optimizers on bfloat16 weights; 4 bytes a value of one weight at a time.

These methods move every weight, outside of the step, between the point where gradients are taken and the
average (Defazio et al., "The Road Less Scheduled", arXiv:2405.15682). On bfloat16 weights beside float32
states they fail, and rounding there and back would lose what the low halves store.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.optim.consolidate import float32_weight, set_float32_weight
from lightning_memkit.utilities.patching import Undo

_MARK = "_memkit_switches_in_float32"


def switch_in_float32(optimizer: Optimizer) -> Undo:
    """Make an optimizer's own `train` and `eval` work on float32 weights; does nothing if it has no such methods.

    With ``split`` the result is bit for bit that on float32 weights, with ``kahan`` to about 16 bits. Without
    low halves each switch rounds the weights to bfloat16.

    Returns:
        The undo.
    """
    stock = type(optimizer)
    if not all(callable(getattr(stock, name, None)) for name in ("train", "eval")) or hasattr(stock, _MARK):
        return lambda: None
    # A subclass instead of methods on the instance: Lightning's wrapper copies the class and looks methods up
    # there.
    methods = {name: _switch(getattr(stock, name)) for name in ("train", "eval")}
    optimizer.__class__ = type(
        stock.__name__, (stock,), {**methods, "__module__": stock.__module__, _MARK: True}
    )

    def undo() -> None:
        optimizer.__class__ = stock

    return undo


def _switch(stock: Callable[[Any], Any]) -> Callable[[Any], None]:
    @wraps(stock)
    def switch(optimizer: Any) -> None:
        with torch.no_grad():
            for shown in _shown_in_turn(optimizer):
                stock(shown)
        for group, switched in zip(optimizer.param_groups, shown.param_groups, strict=True):
            group.update({key: value for key, value in switched.items() if key != "params"})

    return switch


class _ShownWeights:
    """Stands in for an optimizer in one of its methods: other parameters and states, everything else its own."""

    def __init__(self, optimizer: Any, params: list[list[Tensor]], state: Mapping[Tensor, Any]) -> None:
        self._optimizer = optimizer
        self.param_groups = [
            {**group, "params": shown} for group, shown in zip(optimizer.param_groups, params, strict=True)
        ]
        self.state = defaultdict(dict, state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def _shown_in_turn(optimizer: Any) -> Iterator[_ShownWeights]:
    """Yield first all parameters that are not bfloat16, then each other one's float32 form, which is written back."""
    groups = [group["params"] for group in optimizer.param_groups]
    plain = [[p for p in group if p.dtype != torch.bfloat16] for group in groups]
    yield _ShownWeights(optimizer, [*plain], {p: optimizer.state[p] for group in plain for p in group})
    for index, group in enumerate(groups):
        for parameter in group:
            state = optimizer.state.get(parameter)
            if parameter.dtype != torch.bfloat16 or not state:
                continue
            shadow = Parameter(float32_weight(parameter, state), requires_grad=False)
            params: list[list[Tensor]] = [[] for _ in groups]
            params[index] = [shadow]
            yield _ShownWeights(
                optimizer, params, {shadow: {name: _wide(value) for name, value in state.items()}}
            )
            set_float32_weight(parameter, state, shadow)


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype == torch.bfloat16:
        return value.float()
    return value

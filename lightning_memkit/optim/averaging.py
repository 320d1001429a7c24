"""Averages of weights (EMA, SWA) in float32, taken of the float32 weights that are trained: 4 bytes a value.

An average in bfloat16 stands still: with decay 0.999 a step moves it by a thousandth of a difference, less
than half of bfloat16's spacing. Averaging only the bfloat16 weights would leave out their low halves. So the
average is float32, and each update adds the float32 weight: bfloat16 weight and low half joined.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn

from lightning_memkit.optim.consolidate import float32_weight, set_float32_weight
from lightning_memkit.optim.modes import LOW_STATES
from lightning_memkit.optim.pieces import slots

Average = Callable[[Tensor, Tensor], object]  # moves its first argument, in place, towards its second
Optimizers = Optimizer | Iterable[Optimizer]
Wide = Callable[
    [Tensor, Mapping[str, Any]], Tensor
]  # finds the float32 weight from a weight and its optimizer state


def widen_average(average: nn.Module) -> None:
    """Cast the bfloat16 parameters and buffers of an average to float32, in place; it is never run forward."""
    for module in average.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.float()
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype == torch.bfloat16:
                module._buffers[name] = buffer.float()


def update_average(
    averaged: AveragedModel, model: nn.Module, optimizers: Optimizers, wide: Wide = float32_weight
) -> None:
    """`AveragedModel.update_parameters` from the float32 weights; one float32 tensor (4 bytes a value) at a time.

    Args:
        averaged: an `AveragedModel` of the model, after `widen_average`. Its ``multi_avg_fn`` is called with one
            tensor at a time.
        model: the module that is trained.
        optimizers: its optimizers, compensated or not.
        wide: finds the float32 weight; where the states are sharded, it fetches it from the rank that has it.
    """
    average = _copy if averaged.n_averaged == 0 else _average_of(averaged)
    average_parameters(averaged.module, model, optimizers, average, wide)
    for old, current in zip(averaged.module.buffers(), model.buffers(), strict=True):
        if averaged.use_buffers:
            average(old.detach(), current.detach().to(old.device))
        else:
            _copy(old.detach(), current.detach())
    averaged.n_averaged += 1


@torch.no_grad()
def average_parameters(
    averaged: nn.Module,
    model: nn.Module,
    optimizers: Optimizers,
    average: Average,
    wide: Wide = float32_weight,
) -> None:
    """Call ``average(old, new)`` for each averaged parameter, with the float32 weight that is trained as ``new``."""
    states = _states_of(optimizers)
    for old, current in zip(averaged.parameters(), model.parameters(), strict=True):
        new = current.detach()
        if new.dtype == torch.bfloat16:
            new = wide(current, states.get(current, {}))
        average(old.detach(), new.to(old.device))


@torch.no_grad()
def load_average(
    averaged: nn.Module, model: nn.Module, optimizers: Optimizers, *, buffers: bool = True
) -> None:
    """Write an average's parameters (and, by default, buffers) into a model, with their low halves."""
    states = _states_of(optimizers)
    for value, current in _pairs(averaged, model, buffers=buffers):
        if current.dtype == torch.bfloat16:
            set_float32_weight(current, states.get(current, {}), value)
        else:
            current.detach().copy_(value)


class Loan:
    """Lends a model the weights of its average and restores its own bit for bit; 2 bytes a value while lent.

    While the average is lent, the low halves are taken out of the optimizers' states, so that nothing joins
    them with weights that they do not belong to.
    """

    def __init__(self) -> None:
        self._own: list[Tensor] | None = None
        self._low: list[tuple[dict[str, Any], dict[str, Tensor]]] = []

    @torch.no_grad()
    def swap(self, averaged: nn.Module, model: nn.Module, optimizers: Optimizers) -> None:
        """Lend the average, or take it back if it is lent."""
        if self._own is None:
            self._own = [current.detach().clone() for _, current in _pairs(averaged, model)]
            for state in _states_of(optimizers).values():
                self._low.append((state, {name: state.pop(name) for name in LOW_STATES if name in state}))
            for value, current in _pairs(averaged, model):
                current.detach().copy_(value)
        else:
            for own, (_, current) in zip(self._own, _pairs(averaged, model), strict=True):
                current.detach().copy_(own)
            for state, low in self._low:
                state.update(low)
            self._own, self._low = None, []


def _average_of(averaged: AveragedModel) -> Average:
    count, multiple = averaged.n_averaged, averaged.multi_avg_fn
    single = averaged.avg_fn or get_swa_avg_fn()

    def average(old: Tensor, new: Tensor) -> None:
        if multiple is not None:
            multiple([old], [new], count.to(old.device))
        else:
            old.copy_(single(old, new, count.to(old.device)))

    return average


def _copy(old: Tensor, new: Tensor) -> None:
    old.copy_(new)


def _states_of(optimizers: Optimizers) -> dict[Tensor, dict[str, Any]]:
    """The state of each parameter that has one."""
    return {
        slot.parameter: optimizer.state[slot.parameter]
        for optimizer in ([optimizers] if isinstance(optimizers, Optimizer) else optimizers)
        for slot in slots(optimizer)
        if slot.parameter in optimizer.state
    }


def _pairs(averaged: nn.Module, model: nn.Module, *, buffers: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(averaged.parameters(), model.parameters(), strict=True)
    if buffers:
        yield from zip(averaged.buffers(), model.buffers(), strict=True)

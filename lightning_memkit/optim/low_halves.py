"""The low halves of bfloat16 weights when several optimizers step them, at once or one after the other.

A low half belongs to its weight: together they are the float32 value that is trained. So optimizers over one
parameter share one tensor, each in its own state. A step writes into it in place.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_memkit.optim.blocks import first_element, local_part
from lightning_memkit.optim.compensation import Compensation
from lightning_memkit.optim.consolidate import float32_weight
from lightning_memkit.optim.modes import LOW_STATES, low_dtype_of, low_state_of, low_state_of_tensor, narrow_
from lightning_memkit.optim.pieces import is_compensated, slots


def shared_low_halves(compensations: Iterable[Compensation]) -> dict[Parameter, Tensor]:
    """The low half of each weight, as an optimizer holds it that has been stepped; for `compensate(low_halves=)`.

    Those that do not exist yet, or are of another kind than the mode's, are made (2 bytes a parameter): the
    first step of the one optimizer would make them out of the other's sight.
    """
    found: dict[Parameter, Tensor] = {}
    for compensation in compensations:
        name = low_state_of(compensation.mode)
        if name is not None:
            _complete(compensation, name)
            for slot in slots(compensation.optimizer):
                if is_compensated(slot.parameter):
                    found.setdefault(slot.parameter, compensation.optimizer.state[slot.parameter][name])
    return found


def give_low_halves(compensation: Compensation, low_halves: Mapping[Parameter, Tensor]) -> None:
    """Replace the low halves of a compensated optimizer by these; weights that have none here keep theirs."""
    if low_state_of(compensation.mode) is None:
        return
    for slot in slots(compensation.optimizer):
        low = low_halves.get(slot.parameter)
        if low is not None and is_compensated(slot.parameter):
            state = compensation.optimizer.state[slot.parameter]
            for name in LOW_STATES:
                state.pop(name, None)
            state[low_state_of_tensor(low)] = low.to(slot.parameter.device)


@torch.no_grad()
def _complete(compensation: Compensation, name: str) -> None:
    rounding = compensation.engine.rounding
    for slot in slots(compensation.optimizer):
        parameter, state = slot.parameter, compensation.optimizer.state.get(slot.parameter, {})
        if name in state or not is_compensated(parameter):
            continue
        low = torch.zeros_like(parameter.detach(), dtype=low_dtype_of(compensation.mode))
        if any(other in state for other in LOW_STATES):
            parts = (local_part(float32_weight(parameter, state)), local_part(parameter), local_part(low))
            narrow_(compensation.mode, *parts, rounding, (slot.index, first_element(parameter)))
        for other in LOW_STATES:
            state.pop(other, None)
        compensation.optimizer.state[parameter][name] = low
    rounding.end_step()

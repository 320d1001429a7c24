"""The low halves of bfloat16 weights when several optimizers step them, at once or one after the other.

A low half belongs to its weight: together they are the float32 value that is trained. So optimizers over one
parameter share one tensor, each in its own state. A step writes into it in place.
"""

from collections.abc import Iterable, MutableMapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_memkit.optim.compensation import Compensation
from lightning_memkit.optim.low_forms import put_low_halves
from lightning_memkit.optim.modes import LOW_STATES, low_dtype_of, low_state_of
from lightning_memkit.optim.pieces import is_compensated, slots
from lightning_memkit.optim.state_home import home_of


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


def give_low_halves(compensation: Compensation, low_halves: MutableMapping[Parameter, Tensor]) -> None:
    """Replace the low halves of a compensated optimizer by these; weights that have none here keep theirs.

    Where its states live in host memory (`offload_states`) so do they: a bucket at a time is on the device. Elsewhere
    they take the given ones' place in the mapping.
    """
    optimizer, engine, home = compensation.optimizer, compensation.engine, home_of(compensation.optimizer)
    if home is None:
        put_low_halves(optimizer, engine, low_halves)
        return
    given = [slot for slot in slots(optimizer) if slot.parameter in low_halves]
    home.visit(optimizer, given, partial(put_low_halves, optimizer, engine, dict(low_halves)))
    home.settle()


def _complete(compensation: Compensation, name: str) -> None:
    """Give every weight that is stepped a low half of the mode's form."""
    missing: dict[Parameter, Tensor] = {}
    for slot in slots(compensation.optimizer):
        parameter, state = slot.parameter, compensation.optimizer.state.get(slot.parameter, {})
        if name not in state and is_compensated(parameter):
            low = next((state[other] for other in LOW_STATES if other in state), None)
            if low is None:
                low = torch.zeros_like(parameter.detach(), dtype=low_dtype_of(compensation.mode))
            missing[parameter] = low
    put_low_halves(compensation.optimizer, compensation.engine, missing)

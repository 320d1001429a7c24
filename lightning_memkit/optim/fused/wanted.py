"""Which states a fused step keeps of a parameter: their names, dtypes and forms (bfloat16, or 8-bit codes)."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_memkit.optim.blocks import local_part
from lightning_memkit.optim.fused.operands import SGD, Rule
from lightning_memkit.optim.modes import LOW_STATES, Mode, low_dtype_of, low_state_of
from lightning_memkit.optim.quantised import (
    CODES,
    SCALES,
    blocks_of,
    codes_dtype,
    made_for,
    plain_name,
    row_length,
)


class StepStorage(NamedTuple):
    """How a fused step stores weights and moments.

    Args:
        mode: the compensation.
        in_8_bits: moments have 8 bits where a parameter's may have them.
    """

    mode: Mode
    in_8_bits: bool = False


class WantedStates(NamedTuple):
    """The states that parameters of a group have, and their dtypes.

    Args:
        plain: in bfloat16.
        quantised: of parameters with long rows, in 8 bits; None if moments are bfloat16 everywhere.
    """

    plain: dict[str, torch.dtype]
    quantised: dict[str, torch.dtype] | None

    def names(self) -> list[tuple[str, ...]]:
        """The names of the states in each form."""
        return [tuple(form) for form in self if form is not None]

    def of(self, parameter: Tensor) -> dict[str, torch.dtype]:
        """Those of one parameter."""
        return self.plain if self.quantised is None or row_length(parameter) is None else self.quantised


@lru_cache(maxsize=16)
def wanted_states(rule: Rule, storage: StepStorage) -> WantedStates:
    """The state tensors that a step keeps, and their dtypes."""
    moments = [] if isinstance(rule, SGD) and rule.momentum == 0 else [rule.first_name]
    if rule.second_name:
        moments.append(rule.second_name)
    name, dtype = low_state_of(storage.mode), low_dtype_of(storage.mode)
    low = {} if name is None or dtype is None else {name: dtype}
    plain = dict.fromkeys(moments, torch.bfloat16)
    if not storage.in_8_bits or not moments:
        return WantedStates(plain | low, None)
    codes = {name + CODES: codes_dtype(name) for name in moments}
    scales = dict.fromkeys([name + SCALES for name in moments], torch.bfloat16)
    return WantedStates(plain | low, codes | scales | low)


def may_take(state: dict[str, Any], wanted: dict[str, torch.dtype], parameter: Tensor) -> bool:
    """Whether a parameter's state is in the wanted form, as far as it exists."""
    if any(name in state and name not in wanted for name in LOW_STATES):  # saved under another mode
        return False
    if any(_other_form(name) in state for name in wanted):  # saved under other states
        return False
    return all(_fits(state.get(name), name, dtype, parameter) for name, dtype in wanted.items())


def completed(state: dict[str, Any], wanted: dict[str, torch.dtype], parameter: Tensor) -> dict[str, Tensor]:
    """The wanted tensors in their order: those of the state, and zeros for what it lacks."""
    found: dict[str, Tensor] = {}
    made: dict[str, Tensor] = {}
    for name, dtype in wanted.items():
        plain = plain_name(name)
        if plain is not None and state.get(name) is None:
            made |= made_for(parameter, plain, row_length(parameter) or 1)
        if name in made:
            found[name] = made[name]
        elif state.get(name) is not None:
            found[name] = state[name]
        else:
            found[name] = torch.zeros_like(parameter, dtype=dtype)
    return found


def _other_form(name: str) -> str:
    """The name of the same moments in the other form: bfloat16, or codes."""
    return plain_name(name) or name + CODES


def _fits(value: Any, name: str, dtype: torch.dtype, parameter: Tensor) -> bool:
    if value is None:
        return True
    shape = parameter.shape
    if name.endswith(SCALES):
        shape = (shape[0], blocks_of(row_length(parameter) or 1))
        if not local_part(value).is_contiguous():
            return False
    return (
        isinstance(value, Tensor)
        and value.dtype == dtype
        and value.shape == shape
        and value.device == parameter.device
    )

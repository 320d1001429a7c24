"""The fused steps on the CPU, in C++; AdamW with kahan or split moves 18 bytes a parameter."""

from collections.abc import Sequence

import numpy as np

from lightning_memkit.optim import native
from lightning_memkit.optim.fused.operands import SGD, AdamW, Operand, Operands, Rule, first_is_stochastic
from lightning_memkit.optim.modes import Mode
from lightning_memkit.optim.stochastic_rounding import StochasticRounding

_FIRST_IS_STOCHASTIC, _DECOUPLED, _MAXIMIZE, _NESTEROV, _FIRST_STEP = 1, 2, 4, 8, 16


def step(
    rule: Rule, mode: Mode, operands: Sequence[Operand] | Operands, rounding: StochasticRounding
) -> None:
    """Step every operand in one pass over its memory, with as many threads as torch uses; see `reference.step`.

    Raises:
        RuntimeError: there is no kernel; call `native.available` first.
    """
    number, numbers, flags = _numbers(rule)
    if first_is_stochastic(rule):
        flags |= _FIRST_IS_STOCHASTIC
    packed = _packed(rule, Operands.of(operands), rounding)
    native.step((number, mode, flags), numbers, packed, rounding.tile_int16())


def _packed(rule: Rule, operands: Operands, rounding: StochasticRounding) -> np.ndarray:
    """The structs `Operand` of native.cpp, one per row."""
    packed = np.zeros((len(operands), 14), np.uint64)
    packed[:, :3], packed[:, 3] = operands.addresses[:, :3], operands.wide
    packed[:, 4:6], packed[:, 11:13] = operands.addresses[:, 3:5], operands.addresses[:, 5:]
    packed[:, 13] = operands.lengths
    packed[:, 6], packed[:, 7] = operands.counts, operands.starts
    for place, name in enumerate(("weight", rule.first_name, rule.second_name), 8):
        if name:
            packed[:, place] = rounding.streams(operands.indices, name)
    return packed


def _numbers(rule: Rule) -> tuple[int, tuple[float, ...], int]:
    """The rule's number in native.cpp, its scalars in the order in which native.cpp reads them, and its flags."""
    if isinstance(rule, AdamW):
        scalars = (rule.shrink, rule.weight_decay, 1 - rule.beta1, rule.beta2, 1 - rule.beta2,
                   1 / rule.root_correction, rule.eps, -rule.step_size)  # fmt: skip
        return 0, scalars, (_DECOUPLED if rule.decoupled else 0) | (_MAXIMIZE if rule.maximize else 0)
    if isinstance(rule, SGD):
        flags = (_MAXIMIZE if rule.maximize else 0) | (_NESTEROV if rule.nesterov else 0)
        scalars = (rule.weight_decay, rule.momentum, 1 - rule.dampening, -rule.learning_rate)
        return 1, scalars, flags | (_FIRST_STEP if rule.first_step else 0)
    scalars = (rule.shrink, rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2, -rule.learning_rate)
    return 2, scalars, 0

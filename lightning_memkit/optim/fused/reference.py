"""The fused steps in plain torch, chunk by chunk: the reference for the kernels, and the fallback without them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_memkit.optim.blocks import flat_views
from lightning_memkit.optim.fused.operands import (
    SGD,
    TENSORS,
    AdamW,
    Lion,
    Operand,
    Operands,
    Rule,
    first_is_stochastic,
)
from lightning_memkit.optim.modes import Mode, narrow_, widen_
from lightning_memkit.optim.quantised import decode_, encode_
from lightning_memkit.optim.stochastic_rounding import TILE, StochasticRounding

PIECE_ELEMENTS_CPU = TILE  # ten float32 temporaries of this size stay in a core's cache
PIECE_ELEMENTS_ACCELERATOR = 256 * TILE
_FLAT: tuple[str, ...] = TENSORS[:5]
_BY_ROW: tuple[str, ...] = TENSORS[5:]


def step(
    rule: Rule, mode: Mode, operands: Sequence[Operand] | Operands, rounding: StochasticRounding
) -> None:
    """Step every operand; float32 temporaries are bounded by the size of a chunk.

    Args:
        rule: the optimizer's rule and its numbers in this step, the same for all operands.
        mode: the compensation, which stores the bits that bfloat16 lacks.
        operands: one per parameter.
        rounding: the noise of second moments, of slow first moments, of Kahan's compensation and of
            ``mode="stochastic"``.
    """
    for operand in operands:
        for begin, piece in _pieces(operand):
            start = operand.start + begin
            weight = torch.empty_like(piece.weight, dtype=torch.float32)
            widen_(piece.weight, piece.low, weight)
            gradient = piece.gradient.float()
            first = _widened(rule.first_name, piece.first, piece.first_scales)
            second = _widened(rule.second_name, piece.second, piece.second_scales)
            if isinstance(rule, AdamW):
                first, second = _adamw(rule, weight, gradient, (first, second))
            elif isinstance(rule, SGD):
                first = _sgd(rule, weight, gradient, first)
            else:
                first = _lion(rule, weight, gradient, first)
            narrow_(mode, weight, piece.weight, piece.low, rounding, (operand.index, start))
            stream = (operand.index, rule.first_name, start)
            if first is not None and piece.first is not None:
                if piece.first_scales is not None or first_is_stochastic(rule):
                    _round(first, piece.first, piece.first_scales, rounding, stream)
                else:
                    piece.first.copy_(first)
            if second is not None and piece.second is not None:
                stream = (operand.index, rule.second_name, start)
                _round(second, piece.second, piece.second_scales, rounding, stream)


def _widened(name: str, moment: Tensor | None, scales: Tensor | None) -> Tensor | None:
    """A piece's moments as a new float32 tensor."""
    if moment is None:
        return None
    wide = torch.empty_like(moment, dtype=torch.float32)
    if scales is None:
        return wide.copy_(moment)
    decode_(name, moment, scales, wide)
    return wide


def _round(
    wide: Tensor,
    moment: Tensor,
    scales: Tensor | None,
    rounding: StochasticRounding,
    stream: tuple[int, str, int],
) -> None:
    """Write a piece's moments, rounded stochastically, to bfloat16 or to codes and scales."""
    if scales is None:
        rounding.round_(wide, moment, stream)
    else:
        encode_(stream[1], wide, moment, scales, rounding.noise(wide, stream))


def _adamw(
    rule: AdamW, weight: Tensor, gradient: Tensor, moments: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor, Tensor]:
    first, second = moments
    assert first is not None
    assert second is not None
    if rule.maximize:
        gradient = -gradient
    if rule.decoupled:
        weight.mul_(rule.shrink)
    elif rule.weight_decay != 0:
        gradient = gradient.add(weight, alpha=rule.weight_decay)
    first.lerp_(gradient, 1 - rule.beta1)
    second.mul_(rule.beta2).addcmul_(gradient, gradient, value=1 - rule.beta2)
    denominator = second.sqrt().mul_(1 / rule.root_correction).add_(rule.eps)
    weight.addcdiv_(first, denominator, value=-rule.step_size)
    return first, second


def _sgd(rule: SGD, weight: Tensor, gradient: Tensor, first: Tensor | None) -> Tensor | None:
    if rule.maximize:
        gradient = -gradient
    if rule.weight_decay != 0:
        gradient = gradient.add(weight, alpha=rule.weight_decay)
    if first is not None:
        if rule.first_step:
            first = gradient.clone()
        else:
            first.mul_(rule.momentum).add_(gradient, alpha=1 - rule.dampening)
        gradient = gradient.add(first, alpha=rule.momentum) if rule.nesterov else first
    weight.add_(gradient, alpha=-rule.learning_rate)
    return first


def _lion(rule: Lion, weight: Tensor, gradient: Tensor, first: Tensor | None) -> Tensor:
    assert first is not None
    weight.mul_(rule.shrink)
    update = first.mul(rule.beta1).add_(gradient, alpha=1 - rule.beta1).sign_()
    weight.add_(update, alpha=-rule.learning_rate)
    return first.mul_(rule.beta2).add_(gradient, alpha=1 - rule.beta2)


def _pieces(operand: Operand) -> Iterator[tuple[int, Operand]]:
    operand = _flat(operand)
    on_cpu = operand.weight.device.type == "cpu"
    most = PIECE_ELEMENTS_CPU if on_cpu else PIECE_ELEMENTS_ACCELERATOR
    length = max(1, operand.length)
    most = max(length, most - most % length)  # whole rows
    for start in range(0, operand.weight.numel(), most):
        flat, rows = slice(start, start + most), slice(start // length, (start + most) // length)
        cuts = dict.fromkeys(_FLAT, flat) | dict.fromkeys(_BY_ROW, rows)
        tensors = {name: getattr(operand, name) for name in cuts}
        yield (
            start,
            replace(
                operand,
                **{name: None if one is None else one[cuts[name]] for name, one in tensors.items()},
            ),
        )


def _flat(operand: Operand) -> Operand:
    """The operand with one-dimensional tensors, apart from scales."""
    given = {name: getattr(operand, name) for name in _FLAT}
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    flat = flat_views(*tensors.values())
    assert flat is not None  # operands with gaps are refused earlier
    return replace(operand, **dict(zip(tensors, flat, strict=True)))

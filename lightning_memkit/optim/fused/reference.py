"""The fused steps in plain torch, chunk by chunk: the reference for the kernels, and the fallback without them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_memkit.optim.blocks import flat_views
from lightning_memkit.optim.fused.operands import (
    SGD,
    AdamW,
    Lion,
    Operand,
    Operands,
    Rule,
    first_is_stochastic,
)
from lightning_memkit.optim.modes import Mode, narrow_, widen_
from lightning_memkit.optim.stochastic_rounding import TILE, StochasticRounding

PIECE_ELEMENTS_CPU = TILE  # ten float32 temporaries of this size stay in a core's cache
PIECE_ELEMENTS_ACCELERATOR = 256 * TILE


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
            if isinstance(rule, AdamW):
                first, second = _adamw(rule, weight, gradient, piece)
            elif isinstance(rule, SGD):
                first, second = _sgd(rule, weight, gradient, piece), None
            else:
                first, second = _lion(rule, weight, gradient, piece), None
            narrow_(mode, weight, piece.weight, piece.low, rounding, (operand.index, start))
            if first is not None and piece.first is not None:
                if first_is_stochastic(rule):
                    rounding.round_(first, piece.first, (operand.index, rule.first_name, start))
                else:
                    piece.first.copy_(first)
            if second is not None and piece.second is not None:
                rounding.round_(second, piece.second, (operand.index, rule.second_name, start))


def _adamw(rule: AdamW, weight: Tensor, gradient: Tensor, piece: Operand) -> tuple[Tensor, Tensor]:
    assert piece.first is not None
    assert piece.second is not None
    if rule.maximize:
        gradient = -gradient
    if rule.decoupled:
        weight.mul_(rule.shrink)
    elif rule.weight_decay != 0:
        gradient = gradient.add(weight, alpha=rule.weight_decay)
    first = piece.first.float().lerp_(gradient, 1 - rule.beta1)
    second = piece.second.float().mul_(rule.beta2).addcmul_(gradient, gradient, value=1 - rule.beta2)
    denominator = second.sqrt().div_(rule.root_correction).add_(rule.eps)
    weight.addcdiv_(first, denominator, value=-rule.step_size)
    return first, second


def _sgd(rule: SGD, weight: Tensor, gradient: Tensor, piece: Operand) -> Tensor | None:
    if rule.maximize:
        gradient = -gradient
    if rule.weight_decay != 0:
        gradient = gradient.add(weight, alpha=rule.weight_decay)
    first = None
    if piece.first is not None:
        if rule.first_step:
            first = gradient.clone()
        else:
            first = piece.first.float().mul_(rule.momentum).add_(gradient, alpha=1 - rule.dampening)
        gradient = gradient.add(first, alpha=rule.momentum) if rule.nesterov else first
    weight.add_(gradient, alpha=-rule.learning_rate)
    return first


def _lion(rule: Lion, weight: Tensor, gradient: Tensor, piece: Operand) -> Tensor:
    assert piece.first is not None
    first = piece.first.float()
    weight.mul_(rule.shrink)
    update = first.mul(rule.beta1).add_(gradient, alpha=1 - rule.beta1).sign_()
    weight.add_(update, alpha=-rule.learning_rate)
    return first.mul_(rule.beta2).add_(gradient, alpha=1 - rule.beta2)


def _pieces(operand: Operand) -> Iterator[tuple[int, Operand]]:
    operand = _flat(operand)
    on_cpu = operand.weight.device.type == "cpu"
    most = PIECE_ELEMENTS_CPU if on_cpu else PIECE_ELEMENTS_ACCELERATOR
    for start in range(0, operand.weight.numel(), most):
        cut = slice(start, start + most)
        yield (
            start,
            replace(
                operand,
                weight=operand.weight[cut],
                low=None if operand.low is None else operand.low[cut],
                gradient=operand.gradient[cut],
                first=None if operand.first is None else operand.first[cut],
                second=None if operand.second is None else operand.second[cut],
            ),
        )


def _flat(operand: Operand) -> Operand:
    """The operand with one-dimensional tensors."""
    given = {name: getattr(operand, name) for name in ("weight", "low", "gradient", "first", "second")}
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    flat = flat_views(*tensors.values())
    assert flat is not None  # operands with gaps are refused earlier
    return replace(operand, **dict(zip(tensors, flat, strict=True)))

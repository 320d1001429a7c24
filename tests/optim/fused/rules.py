"""Rules, operands and the float64 truth that the tests of every backend share."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.optim.fused.operands import SGD, AdamW, Lion, Operand, Rule
from lightning_memkit.optim.quantised import blocks_of, codes_dtype, decode_, encode_
from lightning_memkit.optim.stochastic_rounding import StochasticRounding

MODES: tuple[Any, ...] = ("kahan", "split", "split24", "stochastic", "none")

RULES: dict[str, Rule] = {
    "adamw": AdamW(
        learning_rate=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True, step=3
    ),
    "adam-maximize-slow": AdamW(
        learning_rate=1e-3,
        beta1=0.95,
        beta2=0.99,
        eps=1e-8,
        weight_decay=0.1,
        decoupled=False,
        step=1,
        maximize=True,
    ),  # fmt: skip
    "sgd": SGD(
        learning_rate=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.01, nesterov=False, first_step=False
    ),
    "sgd-nesterov-first": SGD(
        learning_rate=1e-2, momentum=0.99, dampening=0, weight_decay=0.01, nesterov=True, first_step=True
    ),
    "sgd-nesterov-maximize": SGD(
        learning_rate=1e-2,
        momentum=0.8,
        dampening=0,
        weight_decay=0.0,
        nesterov=True,
        first_step=False,
        maximize=True,
    ),  # fmt: skip
    "sgd-plain": SGD(
        learning_rate=1e-2, momentum=0, dampening=0, weight_decay=0.1, nesterov=False, first_step=False
    ),
    "lion": Lion(learning_rate=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1),
}


def operand(
    rule: Rule, mode: str, count: int = 3001, *, index: int = 0, gradient_dtype: torch.dtype = torch.bfloat16
) -> Operand:
    """A parameter with states as they are in the middle of a training, of many magnitudes."""
    generator = torch.Generator().manual_seed(count + index)

    def normal(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(count, generator=generator)

    weight = normal().bfloat16()
    low = None
    if mode == "kahan":
        low = (weight.float() * 2**-9 * torch.rand(count, generator=generator)).bfloat16()
    elif mode == "split":
        low = torch.randint(-32768, 32768, (count,), generator=generator).to(torch.int16)
    elif mode == "split24":
        low = torch.randint(-128, 128, (count,), generator=generator).to(torch.int8)
    magnitudes = 10 ** (-6 * torch.rand(count, generator=generator))
    has_first = not (isinstance(rule, SGD) and rule.momentum == 0)
    return Operand(
        index=index,
        weight=weight,
        low=low,
        gradient=(normal() * magnitudes).to(gradient_dtype),
        first=(normal(0.1) * magnitudes).bfloat16() if has_first else None,
        second=(normal() * magnitudes).square().bfloat16() if isinstance(rule, AdamW) else None,
    )


def in_8_bits(
    rule: Rule,
    mode: str,
    rows: int,
    length: int,
    *,
    index: int = 0,
    gradient_dtype: torch.dtype = torch.bfloat16,
) -> Operand:
    """As `operand`, with the moments as codes and scales."""
    given = operand(rule, mode, rows * length, index=index, gradient_dtype=gradient_dtype)
    coded: dict[str, Any] = {}
    for name, state in (("first", rule.first_name), ("second", rule.second_name)):
        moment = getattr(given, name)
        if moment is not None:
            codes = torch.zeros(rows * length, dtype=codes_dtype(state))
            scales = torch.zeros(rows, blocks_of(length), dtype=torch.bfloat16)
            noise = torch.randint(0, 1 << 16, codes.shape, generator=torch.Generator().manual_seed(index))
            encode_(state, moment.float(), codes, scales, noise.int())
            coded |= {name: codes, f"{name}_scales": scales}
    return replace(given, **coded, length=length if coded else 0)


def moment(rule: Rule, source: Operand, name: str) -> Tensor | None:
    """The float32 ``first`` or ``second`` of an operand."""
    stored, scales = getattr(source, name), getattr(source, f"{name}_scales")
    if stored is None or scales is None:
        return None if stored is None else stored.float()
    wide = torch.empty(len(stored))
    decode_(getattr(rule, f"{name}_name"), stored, scales, wide)
    return wide


def copied(source: Operand) -> Operand:
    names = ("weight", "low", "first", "second", "first_scales", "second_scales")
    return replace(
        source,
        **{name: None if getattr(source, name) is None else getattr(source, name).clone() for name in names},
    )


def rounding(step: int = 1) -> StochasticRounding:
    noise = StochasticRounding(seed=5)
    noise.step = step
    return noise


def master(source: Operand) -> Tensor:
    """The weight that is trained, in float64, by the definitions of the low halves."""
    if source.low is None:
        return source.weight.double()
    if source.low.dtype == torch.bfloat16:
        return source.weight.double() + source.low.double()
    shift = 8 if source.low.dtype == torch.int8 else 0
    bits = (source.weight.view(torch.int16).int() << 16) + (source.low.int() << shift)
    return bits.view(torch.float32).double()


def truth(rule: Rule, source: Operand) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Weight, first and second moment after the step, in float64, by the formulas of the papers."""
    weight, gradient = master(source), source.gradient.double()
    moments = [moment(rule, source, name) for name in ("first", "second")]
    first, second = (None if one is None else one.double() for one in moments)
    if getattr(rule, "maximize", False):
        gradient = -gradient
    if isinstance(rule, AdamW):
        assert first is not None
        assert second is not None
        if not rule.decoupled:
            gradient = gradient + rule.weight_decay * weight
        first = rule.beta1 * first + (1 - rule.beta1) * gradient
        second = rule.beta2 * second + (1 - rule.beta2) * gradient**2
        corrected = first / (1 - rule.beta1**rule.step)
        root = (second / (1 - rule.beta2**rule.step)).sqrt()
        if rule.decoupled:
            weight = weight - rule.learning_rate * rule.weight_decay * weight
        return weight - rule.learning_rate * corrected / (root + rule.eps), first, second
    if isinstance(rule, Lion):
        assert first is not None
        direction = (rule.beta1 * first + (1 - rule.beta1) * gradient).sign()
        weight = weight - rule.learning_rate * (direction + rule.weight_decay * weight)
        return weight, rule.beta2 * first + (1 - rule.beta2) * gradient, None
    gradient = gradient + rule.weight_decay * weight
    if first is not None:
        first = gradient if rule.first_step else rule.momentum * first + (1 - rule.dampening) * gradient
        gradient = gradient + rule.momentum * first if rule.nesterov else first
    return weight - rule.learning_rate * gradient, first, None

"""The entry to fused steps: a kernel if there is one for the device, plain torch otherwise."""

import warnings
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from lightning_memkit.optim import native
from lightning_memkit.optim.fused import cpu, reference
from lightning_memkit.optim.fused.operands import Operands, Rule
from lightning_memkit.optim.modes import Mode
from lightning_memkit.optim.stochastic_rounding import StochasticRounding


def fused_step(taken: Iterable[tuple[Rule, Operands]], mode: Mode, rounding: StochasticRounding) -> None:
    """Step all operands; AdamW with kahan or split and bfloat16 gradients moves 18 bytes a parameter.

    Args:
        taken: pairs of a rule and the operands that follow it, on one device.
        mode: the compensation, which stores the bits that bfloat16 lacks.
        rounding: its noise.
    """
    for rule, operands in taken:
        kind = operands.weights[0].device.type
        step = reference.step
        if _has_kernel(kind):
            step = cpu.step if kind == "cpu" else _gpu().step
        step(rule, mode, operands, rounding)
        # Kernels write without autograd's knowledge; a graph that saved an old value must notice.
        torch.autograd.graph.increment_version(operands.written())


def _gpu() -> Any:
    from lightning_memkit.optim.fused import gpu  # which needs triton

    return gpu


@cache
def _has_kernel(kind: str) -> bool:
    """Whether there is a kernel for a kind of device; warns once if there is none."""
    if kind == "cpu":
        return native.available()
    why = _gpu().why_unavailable()
    if why is not None:
        warnings.warn(
            f"Optimizer steps over bfloat16 weights run in plain torch on {kind}, several times slower than "
            f"with their kernel: {why}. Install triton to have it (pip install triton).",
            stacklevel=2,
        )
    return why is None

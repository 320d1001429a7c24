"""One front door for fused steps: a kernel where there is one for the device, plain torch otherwise."""

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from lightning_memkit.optim import native
from lightning_memkit.optim.fused import cpu, reference
from lightning_memkit.optim.fused.operands import Operand, Rule
from lightning_memkit.optim.modes import Mode
from lightning_memkit.optim.stochastic_rounding import StochasticRounding


def fused_step(taken: Mapping[Rule, Sequence[Operand]], mode: Mode, rounding: StochasticRounding) -> None:
    """Step all operands; 18 bytes a parameter move with AdamW, kahan or split, and bfloat16 gradients.

    Args:
        taken: operands by the rule that they follow.
        mode: what keeps the bits that bfloat16 lacks.
        rounding: its noise.
    """
    for rule, operands in taken.items():
        by_device: defaultdict[torch.device, list[Operand]] = defaultdict(list)
        for operand in operands:
            by_device[operand.weight.device].append(operand)
        for device, on_device in by_device.items():
            step = reference.step
            if _has_kernel(device.type):
                step = cpu.step if device.type == "cpu" else _gpu().step
            step(rule, mode, on_device, rounding)
            # Kernels write behind autograd's back; a graph that saved an old value must notice.
            written = [(one.weight, one.low, one.first, one.second) for one in on_device]
            torch.autograd.graph.increment_version(
                [tensor for tensors in written for tensor in tensors if tensor is not None]
            )


def _gpu() -> Any:
    from lightning_memkit.optim.fused import gpu  # which needs triton

    return gpu


@cache
def _has_kernel(kind: str) -> bool:
    """Whether there is a kernel for a kind of device; says once why not."""
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

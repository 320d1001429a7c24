"""Steps of the Triton kernels: on CUDA, or on the CPU by Triton's interpreter, which has to be chosen by the
environment before triton is imported. `test_gpu.py` therefore runs the kernel_cases_* in a process of their own.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_memkit.optim.fused import gpu
from lightning_memkit.optim.fused.operands import SGD, TENSORS, Operand, Rule
from lightning_memkit.optim.stochastic_rounding import StochasticRounding

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
# numpy, which the interpreter computes with, warns where float32 overflows or meets a NaN.
numpy_may_warn = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ADD = SGD(learning_rate=-1.0, momentum=0, dampening=0, weight_decay=0, nesterov=False, first_step=False)


def on_device(source: Operand) -> Operand:
    moved: dict[str, Any] = {name: getattr(source, name) for name in TENSORS}
    return replace(source, **{name: None if t is None else t.to(DEVICE) for name, t in moved.items()})


def step(rule: Rule, mode: Any, operands: Sequence[Operand], stream: StochasticRounding) -> None:
    """`gpu.step` on the device, of operands on the CPU."""
    there = [on_device(source) for source in operands]
    gpu.step(rule, mode, there, stream)
    for source, moved in zip(operands, there, strict=True):
        for name in TENSORS:
            if getattr(source, name) is not None:
                getattr(source, name).copy_(getattr(moved, name))


def mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def noise(stream: StochasticRounding, index: int, lane: int, count: int) -> torch.Tensor:
    """The kernels' 32 bits an element, as int64."""
    key = stream.stream(0, "kernels")
    own = mixed(np.array([(key & 0xFFFFFFFF) ^ index], dtype=np.uint32))
    own = mixed(own + np.uint32((key >> 32) + lane * 0x9E3779B9 & 0xFFFFFFFF))
    return torch.from_numpy(mixed(np.arange(count, dtype=np.uint32) ^ own).astype(np.int64))


def rounded_with(value: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """float32 to bfloat16, up where 16 bits of noise carry."""
    moved = value.view(torch.int32).long() + bits
    return (moved >> 16).to(torch.int16).view(torch.bfloat16)

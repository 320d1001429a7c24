"""The fused steps on CUDA, in Triton: one launch for all parameters; AdamW moves 18 bytes a parameter, or 12.

The kernels find the tensors through a table of their addresses on the device. The table is rewritten when an
address changes, from pinned memory and without waiting for the device. Weights and states stay where they
are, and gradients mostly return to the same addresses, so most steps copy nothing. A table holds addresses
only: it keeps no tensor alive.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from lightning_memkit.memory.out_of_memory import is_out_of_memory
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
from lightning_memkit.optim.modes import Mode, low_dtype_of
from lightning_memkit.optim.quantised import BLOCK as SHARED
from lightning_memkit.optim.stochastic_rounding import StochasticRounding
from lightning_memkit.utilities.tensors import sent

# Eight elements a thread are 16 bytes of bfloat16. At AdamW's 72 registers a thread, seven programs share a
# Hopper multiprocessor and have 70 kB of reads in flight. Fixed rather than tuned at run time, so that every
# launch is the same.
BLOCK = 1024
WARPS = 4

_OLDEST_TRITON = (3, 4)
_MOST_TABLES = 1024  # per optimizer; more means that they are not reused

_tables: "WeakKeyDictionary[StochasticRounding, dict[tuple, _Table]]" = WeakKeyDictionary()


def step(
    rule: Rule, mode: Mode, operands: Sequence[Operand] | Operands, rounding: StochasticRounding
) -> None:
    """Step every operand in one pass over its memory, with one launch for each device and gradient dtype.

    The noise is a function of the seed, the step, the parameter's index and the element, but differs from the
    reference's.

    Args:
        rule: the optimizer's rule and its numbers in this step.
        mode: the compensation, which stores the bits that bfloat16 lacks.
        operands: one per parameter.
        rounding: its seed and step number are the key of the kernels' noise.

    Raises:
        ValueError: an operand lacks a tensor that the rule or the mode needs, or has one of another dtype.
    """
    from lightning_memkit.optim.fused import kernels

    kernel = {AdamW: kernels.adamw, SGD: kernels.sgd, Lion: kernels.lion}[type(rule)]
    key = rounding.stream(0, "kernels")
    for device, wide, in_8_bits, group in _launches(Operands.of(operands)):
        with torch.cuda.device(device) if device >= 0 else contextlib.nullcontext():
            table = _table(rounding, rule, mode, group)
            kernel[(table.blocks.numel(),)](
                table.rows,
                table.blocks,
                *_signed_halves(key),
                *numbers(rule),
                MODE=mode,
                WIDE_GRADIENT=wide,
                **switches(rule, group.firsts[0] is not None, in_8_bits),
                BLOCK=BLOCK,
                num_warps=WARPS,
                enable_fp_fusion=False,
            )


@cache
def why_unavailable() -> str | None:
    """The reason why no kernel can run here, or None. The first call launches one on a single element.

    Raises:
        torch.OutOfMemoryError: the device has no memory left for the test. Nothing is cached then, so that
            the next call tests again.
    """
    if not torch.cuda.is_available() or torch.version.hip:
        return "the kernels are for CUDA, and torch sees no such device"
    try:
        import triton
    except ImportError:
        return "triton is not installed"
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < _OLDEST_TRITON:
        return f"triton {triton.__version__} is older than {'.'.join(map(str, _OLDEST_TRITON))}"
    try:
        one = torch.zeros(1, dtype=torch.bfloat16, device="cuda")
        operand = Operand(index=0, weight=one, low=None, gradient=one.clone(), first=one.clone())
        rule = Lion(learning_rate=0.0, beta1=0.9, beta2=0.9, weight_decay=0.0)
        step(rule, "none", [operand], StochasticRounding())
    except Exception as error:  # any failure to compile or launch: a compiler, a driver
        if is_out_of_memory(error):
            raise
        return f"triton can't launch a kernel ({type(error).__name__}: {error})"
    return None


def numbers(rule: Rule) -> tuple[float, ...]:
    """The scalars that the rule's kernel takes, in its order."""
    if isinstance(rule, AdamW):
        correction = 1 / rule.root_correction
        values = (rule.shrink, rule.weight_decay, 1 - rule.beta1, rule.beta2, 1 - rule.beta2)
        values += (correction, rule.eps, rule.step_size)
    elif isinstance(rule, SGD):
        values = (rule.weight_decay, rule.momentum, 1 - rule.dampening, rule.learning_rate)
    else:
        values = (rule.shrink, rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2, rule.learning_rate)
    return tuple(map(float, values))  # an int, such as lr=1, would compile a second kernel


def switches(rule: Rule, has_first: bool, in_8_bits: bool = False) -> dict[str, bool]:
    """The compile-time switches of the rule's kernel, apart from the mode and the gradient's dtype."""
    chosen = {"EIGHT": in_8_bits, "STOCHASTIC": in_8_bits or first_is_stochastic(rule)}
    if isinstance(rule, Lion):
        return chosen
    # Without decay the term is skipped: zero times an infinite weight would be NaN.
    chosen |= {"MAXIMIZE": rule.maximize, "DECAYS": rule.weight_decay != 0}
    if isinstance(rule, AdamW):
        return chosen | {"DECOUPLED": rule.decoupled}
    return chosen | {"MOMENTUM": has_first, "FIRST_STEP": rule.first_step, "NESTEROV": rule.nesterov}


class _Table:
    """The addresses of one launch's tensors, and which block belongs to which tensor, on the device."""

    def __init__(self) -> None:
        self.rows = self.blocks = torch.empty(0)
        self._addresses = np.empty((0, len(TENSORS)), np.uint64)
        self._counts = np.empty(0, np.uint64)

    def update(self, operands: Operands) -> bool:
        """Rewrite the table if an address changed since the last step; True if anything but gradients moved."""
        addresses, known = operands.addresses, self._addresses
        same = addresses.shape == known.shape and np.array_equal(operands.counts, self._counts)
        if same and np.array_equal(addresses, known):
            return False
        device, self._addresses = operands.weights[0].device, addresses
        counts, lengths = operands.counts.astype(np.int64), operands.lengths.astype(np.int64)
        rows_of = counts // np.maximum(lengths, 1)
        owned = np.where(lengths > 0, rows_of * -(-lengths // SHARED) * SHARED, counts)
        blocks = -(-owned // BLOCK)
        if not same:
            self._counts = operands.counts
            of_block = np.repeat(np.arange(len(counts), dtype=np.int32), blocks)
            self.blocks = sent(torch.from_numpy(of_block), device)
        rows = np.empty((len(counts), 12), np.int64)
        rows[:, :5], rows[:, 5] = addresses[:, :5].view(np.int64), counts
        fast = (addresses[:, :5] % 16 == 0).all(1) & (lengths % SHARED == 0)
        rows[:, 6] = 2 * (blocks.cumsum() - blocks) + fast
        rows[:, 7] = operands.indices
        rows[:, 8] = operands.starts
        rows[:, 9:11], rows[:, 11] = addresses[:, 5:].view(np.int64), lengths
        self.rows = sent(torch.from_numpy(rows), device)
        kept = (0, 1, 3, 4, 5, 6)
        return not (same and np.array_equal(addresses[:, kept], known[:, kept]))


def _table(rounding: StochasticRounding, rule: Rule, mode: Mode, operands: Operands) -> _Table:
    """The table of these operands for one launch on one stream; the stream orders writing before use."""
    tables = _tables.setdefault(rounding, {})
    device = operands.weights[0].device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    name = (device, stream, bool(operands.wide[0]), operands.indices.tobytes())
    if name not in tables and len(tables) >= _MOST_TABLES:
        tables.clear()
    table = tables.setdefault(name, _Table())
    lengths = [gradient.numel() for gradient in operands.gradients]
    if table.update(operands) or lengths != operands.counts.tolist():
        for operand in operands:
            _check(rule, mode, operand)
    return table


def _check(rule: Rule, mode: Mode, operand: Operand) -> None:
    """Refuse operands that would make a kernel read memory out of bounds."""
    momentum = not isinstance(rule, SGD) or rule.momentum != 0
    in_8_bits, has_second = operand.length > 0, isinstance(rule, AdamW)
    expected: dict[str, tuple[Any, ...]] = {
        "weight": (torch.bfloat16,),
        "low": (low_dtype_of(mode),),
        "gradient": (torch.bfloat16, torch.float32),
        "first": ((torch.int8 if in_8_bits else torch.bfloat16) if momentum else None,),
        "second": ((torch.uint8 if in_8_bits else torch.bfloat16) if has_second else None,),
        "first_scales": (torch.bfloat16 if in_8_bits else None,),
        "second_scales": (torch.bfloat16 if in_8_bits and has_second else None,),
    }
    rows = operand.weight.numel() // max(operand.length, 1)
    counts: dict[str, int] = dict.fromkeys(TENSORS[5:], rows * -(-operand.length // SHARED))
    for name, dtypes in expected.items():
        tensor = getattr(operand, name)
        found = None if tensor is None else tensor.dtype
        if found not in dtypes:
            raise ValueError(
                f"{name} of parameter {operand.index} is {found}; a fused {type(rule).__name__} step in "
                f"mode={mode!r} takes {' or '.join(map(str, dtypes))}."
            )
        count = counts.get(name, operand.weight.numel())
        if tensor is not None and (tensor.numel() != count or not tensor.is_contiguous()):
            raise ValueError(
                f"{name} of parameter {operand.index} has {tensor.numel()} elements and strides "
                f"{tensor.stride()}; it must be contiguous, with {count} elements."
            )


def _launches(operands: Operands) -> Iterator[tuple[int, bool, bool, Operands]]:
    """Yield each launch's device index, whether gradients are float32 and moments 8-bit, and operands, none empty."""
    if operands.is_uniform:
        in_8_bits = bool(operands.lengths[0])
        yield _device_index(operands.weights[0]), bool(operands.wide[0]), in_8_bits, operands
        return
    launches: defaultdict[tuple[int, bool, bool, bool], list[int]] = defaultdict(list)
    for place, (weight, first) in enumerate(zip(operands.weights, operands.firsts, strict=True)):
        if weight.numel():
            wide, in_8_bits = bool(operands.wide[place]), bool(operands.lengths[place])
            launches[_device_index(weight), wide, in_8_bits, first is not None].append(place)
    for (device, wide, in_8_bits, _), places in launches.items():
        yield device, wide, in_8_bits, operands.only(places)


def _device_index(weight: Tensor) -> int:
    return (weight.device.index or 0) if weight.device.type == "cuda" else -1


def _signed_halves(key: int) -> tuple[int, int]:
    low = key & 0xFFFFFFFF
    return (low - (1 << 32) if low >> 31 else low), key >> 32

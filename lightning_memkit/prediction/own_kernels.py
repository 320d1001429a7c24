"""memkit's own kernels on fake tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from lightning_memkit.optim import blocks, kahan, native, split
from lightning_memkit.prediction.work import WorkLog

# A field of native.cpp's struct `Operand`, and the bytes that a fused step moves with two moments and a low
# half.
_ELEMENTS_FIELD, _BYTES_A_STEP = 6, 18


@contextmanager
def without_kernels(work: WorkLog) -> Iterator[None]:
    """Make memkit's own kernels, which write to addresses, only record the bytes that they would move."""

    def step(kind: Any, numbers: Any, operands: np.ndarray, tile: Tensor) -> None:
        work.note_kernel("memkit.step", int(operands[:, _ELEMENTS_FIELD].sum()) * _BYTES_A_STEP)

    def walk(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        yield from _two_blocks(work, *tensors)

    kernels, address, addresses = native._kernels, native.address, native.addresses
    plain_step, plain_walk = native.step, blocks.blocks
    native._kernels, native.address = (lambda: _Nothing), (lambda tensor: 0)  # pyright: ignore
    native.addresses = lambda tensors: [0 for _ in tensors]
    native.step = step
    kahan.blocks = split.blocks = walk
    try:
        yield
    finally:
        native._kernels, native.address, native.addresses = kernels, address, addresses
        native.step = plain_step
        kahan.blocks = split.blocks = plain_walk


class _Nothing:
    memkit_widen = memkit_narrow = staticmethod(lambda *_: None)


def _two_blocks(work: WorkLog, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The first and last block only: nothing is written, and all blocks take the same memory."""
    flat = blocks.flat_views(*tensors)
    if flat is None or tensors[0].numel() <= 2 * blocks.BLOCK_ELEMENTS:
        yield from blocks.blocks(*tensors)
        return
    before, work.weight = work.weight, tensors[0].numel() / (2 * blocks.BLOCK_ELEMENTS)
    try:
        for part in (slice(None, blocks.BLOCK_ELEMENTS), slice(-blocks.BLOCK_ELEMENTS, None)):
            yield tuple(tensor[part] for tensor in flat)
    finally:
        work.weight = before

"""Gives a recomputed forward the buffers that the first forward saw, and discards what it writes to them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

Snapshot = dict[str, Tensor]


class StatefulBuffers:
    """Knows which buffers of a block its forward writes: running statistics, counters, power iterations.

    Those of batch and instance norms are known from the start. All others are found in the first forward, at
    the cost of one copy of the block's buffers for this call; later calls copy only the written ones.
    """

    def __init__(self, block: nn.Module) -> None:
        self._written = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in block.named_modules()
            if isinstance(module, _NormBase) and module.track_running_stats
            for name, _ in module.named_buffers(recurse=False)
        }
        self._probed = next(block.buffers(), None) is None

    def snapshot(self, block: nn.Module) -> Snapshot:
        """Copies of the written buffers; of all buffers before the first forward."""
        if self._probed and not self._written:
            return {}
        return {
            name: buffer.detach().clone()
            for name, buffer in block.named_buffers(remove_duplicate=False)
            if not self._probed or name in self._written
        }

    def learn(self, block: nn.Module, before: Snapshot) -> None:
        """After the first forward: keep the copies of buffers that it wrote, drop the others."""
        if self._probed:
            return
        now = dict(block.named_buffers(remove_duplicate=False))
        self._written |= {name for name, old in before.items() if name in now and not _same(old, now[name])}
        self._probed = True
        for name in before.keys() - self._written:
            del before[name]


@contextmanager
def buffers_replaced(block: nn.Module, snapshot: Snapshot) -> Iterator[None]:
    """Run with copies of the snapshot in place of the block's buffers, then restore the real ones."""
    real: list[tuple[nn.Module, str, Tensor | None]] = []
    for name, value in snapshot.items():
        path, _, key = name.rpartition(".")
        owner = block.get_submodule(path)
        real.append((owner, key, owner._buffers[key]))
        # A copy, because a graph kept with retain_graph=True is recomputed once for every backward.
        owner._buffers[key] = value.clone()
    try:
        yield
    finally:
        for owner, key, buffer in real:
            owner._buffers[key] = buffer


def _same(old: Tensor, new: Tensor) -> bool:
    return old.shape == new.shape and old.dtype == new.dtype and torch.equal(old, new)

"""Chooses between recomputation and offload, block by block, from measured times."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_memkit.memory.pinned import return_pinned

_TRIED_BYTES = (16 << 20, 4 << 20, 1 << 20)  # the largest that fits on the device is copied
_COPIES = 3
_WARM_UP_PASSES, _MEASURED_PASSES = 1, 2  # kernels are loaded and tuned in the first pass
_BACKWARD = 2.0  # a block's backward takes about twice its forward: two products for each of the forward's


@dataclass(frozen=True, kw_only=True)
class CopyRates:
    """Bytes a second between a device and pinned host memory."""

    to_host: float
    to_device: float


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """The measured cost of a block's run.

    Args:
        name: the block.
        forward_seconds: the time of its forward, without copies.
        moved_bytes: the bytes of its activations that go to the host.
    """

    name: str
    forward_seconds: float
    moved_bytes: int


@dataclass(frozen=True, kw_only=True)
class BlockChoice:
    """A block's cost, and whether it is recomputed instead of offloaded."""

    cost: BlockCost
    recompute: bool


def choose_blocks(costs: Sequence[BlockCost], rates: CopyRates) -> list[BlockChoice]:
    """Offload the blocks whose copies overlap fully with the next block's work; recompute the others.

    A copy to the host overlaps with the next block's forward, a copy back with the next block's backward. The
    last block's activations never leave. A block that runs several times is judged by its worst run.

    Args:
        costs: one for each run, in the order of the forward.
        rates: those of the device.
    """
    late = {
        cost.name
        for cost, following in zip(costs, costs[1:], strict=False)
        if cost.moved_bytes > rates.to_host * following.forward_seconds
        or cost.moved_bytes > rates.to_device * _BACKWARD * following.forward_seconds
    }
    first: dict[str, BlockCost] = {}
    for cost in costs:
        first.setdefault(cost.name, cost)
    return [BlockChoice(cost=cost, recompute=name in late) for name, cost in first.items()]


def measure_copy_rates(device: torch.device, pin_memory: bool = True) -> CopyRates:
    """Time copies of up to 16 MiB on a separate stream, as the offload makes them; takes milliseconds.

    Raises:
        torch.OutOfMemoryError: the device does not even have 1 MiB left.
    """
    here = _room(device)
    there = torch.empty(here.nbytes, dtype=torch.uint8, pin_memory=pin_memory)
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))

    def seconds(to: Tensor, source: Tensor) -> float:
        best = float("inf")
        for _ in range(_COPIES):
            stream.synchronize()
            start = time.perf_counter()
            with stream:
                to.copy_(source, non_blocking=True)
            stream.synchronize()
            best = min(best, time.perf_counter() - start)
        return max(best, 1e-9)

    rates = CopyRates(
        to_host=here.nbytes / seconds(there, here), to_device=here.nbytes / seconds(here, there)
    )
    del there
    if pin_memory:
        return_pinned()
    return rates


def _room(device: torch.device) -> Tensor:
    for size in _TRIED_BYTES[:-1]:
        try:
            return torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            continue
    return torch.empty(_TRIED_BYTES[-1], dtype=torch.uint8, device=device)


class Stopwatch:
    """Times the blocks' forwards in the first passes, synchronizing with the device around each block.

    Args:
        names: the blocks' names.
    """

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self._names = names
        self._costs: list[list[BlockCost]] = []

    def wants(self, passes: int) -> bool:
        """Whether the pass with this number, counted from 1, is to be timed."""
        return _WARM_UP_PASSES < passes <= _WARM_UP_PASSES + _MEASURED_PASSES

    def is_done(self, passes: int) -> bool:
        """Whether all timed passes come before the pass with this number."""
        return passes > _WARM_UP_PASSES + _MEASURED_PASSES

    @contextmanager
    def timed(self, block: nn.Module, device: torch.device, passes: int) -> Iterator[list[int]]:
        """Time the body; the caller appends the bytes that it moved to the yielded list."""
        while len(self._costs) < passes - _WARM_UP_PASSES:
            self._costs.append([])
        stream = torch.accelerator.current_stream(device)
        moved: list[int] = []
        stream.synchronize()
        start = time.perf_counter()
        yield moved
        stream.synchronize()
        seconds = time.perf_counter() - start
        cost = BlockCost(name=self._names[block], forward_seconds=seconds, moved_bytes=sum(moved))
        self._costs[passes - 1 - _WARM_UP_PASSES].append(cost)

    @property
    def costs(self) -> list[BlockCost]:
        """The costs of the fastest timed pass, all blocks together: other load on the machine only adds time."""
        passes = [costs for costs in self._costs if costs]
        return min(passes, key=lambda costs: sum(cost.forward_seconds for cost in costs), default=[])

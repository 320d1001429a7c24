"""Counts how often a step allocates: one that never does can't run out of memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_memkit.memory.meter import ByteMeter
from lightning_memkit.optim.pieces import slots

_TORCHS_OWN = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional")  # namespaces of operators


def allocations_in(optimizer: Optimizer, act: Callable[[], object]) -> int:
    """An upper bound of how often an action allocates: on the parameters' CUDA devices, or else anywhere."""
    on_cuda = {slot.parameter.device for slot in slots(optimizer) if slot.parameter.device.type == "cuda"}
    if not on_cuda:
        with _AllocationCount() as meter:
            act()
        return meter.allocations
    before = sum(_allocations_so_far(device) for device in on_cuda)
    act()
    return sum(_allocations_so_far(device) for device in on_cuda) - before


class _AllocationCount(ByteMeter):
    """Counts an operator of another library as one allocation, since those it makes inside are not seen."""

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.allocations += func.namespace not in _TORCHS_OWN
        return super()._count(func, args, kwargs)


def _allocations_so_far(device: torch.device) -> int:
    return torch.cuda.memory_stats(device).get("allocation.all.allocated", 0)

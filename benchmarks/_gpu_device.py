"""What a row asks a device: peaks of its allocator, the time of a step there and on the host, and to be emptied."""

import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from lightning_memkit.memory.measure import AllocatorMeter
from lightning_memkit.memory.meter import ByteMeter

TIMES = 20
WARM_SECONDS = 0.3  # a processor that was idle is slower at first: by a half on an H200's host


class Peak:
    """The most bytes above those at entry: of the allocator, or of tensors where the device has none that counts.

    `reserved_bytes` is 0 where nothing is cached.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._meter = device, None if AllocatorMeter.counts(device) else ByteMeter()
        self._module: Any = torch.get_device_module(device)
        self.allocated_bytes = self.reserved_bytes = 0

    def __enter__(self) -> "Peak":
        if self._meter is not None:
            self._meter.__enter__()
            return self
        self._module.synchronize(self._device)
        self._before = self._module.memory_allocated(self._device), self._reserved("memory_reserved")
        self._module.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._meter is not None:
            self._meter.__exit__(kind, error, trace)
            self.allocated_bytes = self._meter.peak_bytes
        elif error is None:
            self._module.synchronize(self._device)
            self.allocated_bytes = self._module.max_memory_allocated(self._device) - self._before[0]
            self.reserved_bytes = self._reserved("max_memory_reserved") - self._before[1]

    def _reserved(self, what: str) -> int:
        ask = getattr(self._module, what, None)
        return 0 if ask is None else ask(self._device)


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was given; the CPU always has."""
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        module.synchronize(device)


def device_seconds(step: Callable[[], object], device: torch.device, times: int = TIMES) -> float:
    """Seconds of a step, of many that are launched one after the other."""
    for _ in range(3):
        step()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / times


def host_seconds(step: Callable[[], object], device: torch.device, times: int = TIMES) -> float:
    """The median time until the host has launched a step on an idle device, once the host is warm."""
    until = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < until:
        step()
    seconds = []
    for _ in range(times):
        synchronize(device)
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    synchronize(device)
    return median(seconds)


def host_seconds_more(
    step: Callable[[], object], beside: Callable[[], object], device: torch.device, times: int = TIMES
) -> float:
    """The median time that the host takes longer for one step than for another, each timed in turn.

    The difference is small beside either, and a processor's speed changes from one second to the next.
    """
    more = []
    until = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < until or len(more) < times:
        seconds = []
        for act in (step, beside):
            synchronize(device)
            start = time.perf_counter()
            act()
            seconds.append(time.perf_counter() - start)
        more.append(seconds[0] - seconds[1])
    synchronize(device)
    return median(more[-times:])


def emptied(device: torch.device) -> int:
    """Free what earlier rows have left, also cuBLAS's workspaces; returns the bytes of tensors that stay."""
    gc.collect()
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return 0
    torch.cuda.synchronize()
    clear: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()

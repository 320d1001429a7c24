"""Measure the memory of a device, and the peak of a piece of work."""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_memkit.memory.cublas import cublas_bytes
from lightning_memkit.memory.limits import device_memory, host_limits, reserved_bytes
from lightning_memkit.memory.meter import ByteMeter
from lightning_memkit.memory.units import format_bytes, is_auto, parse_bytes, parse_fraction

_LEAST_BYTES = 2**16  # no model trains in less, so the unit must be a mistake


class PeakMeter(Protocol):
    """A context manager that gives the peak after it is left."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes in use while the meter was entered."""
        ...

    def __enter__(self) -> "PeakMeter": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> object: ...


class AllocatorMeter:
    """The peak of what a device's allocator *reserves*, or allocates if it does not cache.

    The context is not included: `budget_bytes` leaves room for it.
    """

    def __init__(self, device: torch.device, budget_bytes: int | None = None) -> None:
        self.device = device
        self.budget_bytes = budget_bytes
        self.peak_bytes = 0
        self._module: Any = torch.get_device_module(device)

    @staticmethod
    def counts(device: torch.device) -> bool:
        """Whether a device's allocator records a peak, as those of CUDA, ROCm and XPU do."""
        module = torch.get_device_module(device)
        return hasattr(module, "reset_peak_memory_stats") and hasattr(module, "max_memory_allocated")

    def __enter__(self) -> "AllocatorMeter":
        self._module.synchronize(self.device)
        self._module.empty_cache()
        self._module.reset_peak_memory_stats(self.device)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._module.synchronize(self.device)
        caches = hasattr(self._module, "max_memory_reserved")
        peak = self._module.max_memory_reserved if caches else self._module.max_memory_allocated
        self.peak_bytes = peak(self.device)
        if error is None and self.budget_bytes is not None and self.peak_bytes > self.budget_bytes:
            raise torch.OutOfMemoryError(
                f"The peak of {format_bytes(self.peak_bytes)} is over the budget of "
                f"{format_bytes(self.budget_bytes)}."
            )


def peak_meter(
    device: torch.device, resident: Iterable[Tensor], budget_bytes: int | None = None
) -> PeakMeter:
    """A meter of a device's peak: its allocator's if that records one, else counted operator by operator.

    Args:
        device: where the work runs.
        resident: tensors that are alive already (weights, states, the batch), to be counted.
        budget_bytes: a peak above it raises `torch.OutOfMemoryError`.
    """
    if AllocatorMeter.counts(device):
        return AllocatorMeter(device, budget_bytes)
    meter = ByteMeter(budget_bytes=budget_bytes)
    meter.track(resident)
    return meter


def fixed_bytes(device: torch.device) -> int:
    """What an accelerator's driver counts besides the allocator (context, other processes); 0 elsewhere."""
    memory = device_memory(device) if device.type != "mps" else None
    if memory is None:
        return 0
    free, total = memory
    return max(0, total - free - reserved_bytes(device))


def bytes_beside(module: nn.Module) -> int:
    """What this process holds besides a module's tensors; 0 if the system does not tell."""
    held = sum(t.untyped_storage().nbytes() for t in [*module.parameters(), *module.buffers()])
    return max(0, process_bytes() - held)


def process_bytes() -> int:
    """The resident set size of this process; 0 if the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The total and the free bytes of a device; `source` names what limits them."""

    total_bytes: int
    free_bytes: int
    source: str = ""


def capacity(device: torch.device) -> Capacity:
    """A device's memory: an accelerator's from its driver, the host's from the tightest of its limits."""
    memory = device_memory(device)
    if memory is not None:
        return Capacity(total_bytes=memory[1], free_bytes=memory[0])
    limits = host_limits()
    tightest = min(limits, key=lambda limit: limit.total_bytes)
    free = min(limit.free_bytes for limit in limits)
    return Capacity(total_bytes=tightest.total_bytes, free_bytes=max(0, free), source=tightest.source)


def budget_bytes(budget: int | float | str, device: torch.device) -> int:
    """The bytes that a budget means on a device.

    Args:
        budget: `"22GiB"`, a count of bytes, a fraction of the device's memory (0.9, `"90%"`), or `"auto"`: all
            that is free now, plus what this process's allocator has reserved on an accelerator. There a
            budget covers only tensors: context and other processes are outside of it, and a fraction or
            `"auto"` leaves room for them.
        device: the device whose memory it is.

    Raises:
        ValueError: the budget can't be parsed, is outside its range, exceeds what the device and its other
            users leave, or is no more than cuBLAS's workspaces (`cublas_bytes`), also where it is `"auto"`.
    """
    have, fixed = capacity(device), fixed_bytes(device)
    if is_auto(budget):
        # The driver's free bytes leave out what this process holds, which is within the budget.
        free = have.free_bytes + reserved_bytes(device)
        _check_room(free, budget, device)
        return free
    beside = ""
    if fixed:
        beside = f", of which {format_bytes(fixed)} are other processes' and this one's context"
    elif have.source not in ("", "RAM"):
        beside = f", by {have.source}"
    fraction = parse_fraction(budget)
    if fraction is not None:
        share = int(fraction * have.total_bytes) - fixed
        if share < _LEAST_BYTES:
            raise ValueError(
                f"budget={budget!r} of {device} ({format_bytes(have.total_bytes)}{beside}) leaves nothing for "
                "tensors; write a larger fraction, or end the other processes."
            )
        _check_room(share, budget, device)
        return share
    size = parse_bytes(int(budget) if isinstance(budget, float) else budget)
    if size > have.total_bytes - fixed:
        raise ValueError(
            f"budget={budget!r} is more than {device} has ({format_bytes(have.total_bytes)}{beside}); write a size up "
            f'to {format_bytes(have.total_bytes - fixed)}, a fraction such as 0.9, or "auto".'
        )
    _check_room(size, budget, device)
    return size


def _check_room(size: int, budget: int | float | str, device: torch.device) -> None:
    library = cublas_bytes(device)
    if library and size <= library:
        remedy = "End other processes there" if is_auto(budget) else "Write a larger budget"
        raise ValueError(
            f"budget={budget!r} ({format_bytes(size)}) leaves nothing for tensors on {device}: within it cuBLAS keeps "
            f"{format_bytes(library)} for matrix products, a workspace for the forward and one for the backward. "
            f"{remedy}, or set CUBLAS_WORKSPACE_CONFIG=:16:8 (256 KiB for both; slower on large products)."
        )


def check_budget(budget: object) -> None:
    """Refuse a budget that can't be parsed, before any device is queried.

    Raises:
        ValueError: with the value, the rule and the remedy.
    """
    rule = (
        'a budget is a size such as "22GiB" (at least 64 KiB), a count of bytes, a fraction of the device in '
        '(0, 1] such as 0.9 or "90%", or "auto"'
    )
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise ValueError(f"budget={budget!r} is not a budget: {rule}.")
    if isinstance(budget, float) and not math.isfinite(budget):
        raise ValueError(f"budget={budget!r} is not a budget: {rule}.")
    if is_auto(budget) or parse_fraction(budget) is not None:
        return
    # YAML and command lines may give a count of bytes as a float.
    whole = int(budget) if isinstance(budget, float) and budget == int(budget) else budget
    if not isinstance(whole, str) and (isinstance(whole, float) or whole < _LEAST_BYTES):
        hint = f'; for GiB write "{whole:g}GiB"' if whole > 0 else ""
        hint += f", for {whole:g} % of the device {whole / 100:g}" if 1 < whole <= 100 else ""
        raise ValueError(f"budget={budget!r} is outside (0, 1], and no count of bytes: {rule}{hint}.")
    try:
        size = parse_bytes(whole)
    except ValueError:
        raise ValueError(f"budget={budget!r} is no positive size: {rule}.") from None
    if size < _LEAST_BYTES:
        hint = f'; for GiB write "{size}GiB"' if str(budget).strip() == str(size) else ""
        raise ValueError(f"budget={budget!r} is only {format_bytes(size)}: {rule}{hint}.")

"""How much memory a device has, and how much a piece of work took at its peak."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from lightning_memkit.memory.meter import ByteMeter
from lightning_memkit.memory.units import format_bytes, parse_bytes

_LEAST_BYTES = 2**16  # less is a slip of the unit: no model trains in it


class PeakMeter(Protocol):
    """A context manager that knows the peak after it is left."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes in use while the meter was entered."""
        ...

    def __enter__(self) -> "PeakMeter": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> object: ...


class AllocatorMeter:
    """The peak of what CUDA's caching allocator *reserves*; not yet verified on GPU.

    The context lies beside it: `budget_bytes` leaves room for it.
    """

    def __init__(self, device: torch.device, budget_bytes: int | None = None) -> None:
        self.device = device
        self.budget_bytes = budget_bytes
        self.peak_bytes = 0

    def __enter__(self) -> "AllocatorMeter":
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        torch.cuda.synchronize(self.device)
        self.peak_bytes = torch.cuda.max_memory_reserved(self.device)
        if error is None and self.budget_bytes is not None and self.peak_bytes > self.budget_bytes:
            raise torch.OutOfMemoryError(
                f"The peak of {format_bytes(self.peak_bytes)} is over the budget of "
                f"{format_bytes(self.budget_bytes)}."
            )


def peak_meter(
    device: torch.device, resident: Iterable[Tensor], budget_bytes: int | None = None
) -> PeakMeter:
    """A meter of a device's peak: the allocator's on CUDA, counted operator by operator elsewhere.

    Args:
        device: where the work runs.
        resident: tensors that are alive already (weights, states, the batch), to be counted.
        budget_bytes: a peak above it raises `torch.OutOfMemoryError`.
    """
    if device.type == "cuda":
        return AllocatorMeter(device, budget_bytes)
    meter = ByteMeter(budget_bytes=budget_bytes)
    meter.track(resident)
    return meter


def fixed_bytes(device: torch.device) -> int:
    """CUDA: what the driver counts besides the allocator (context, other processes); elsewhere 0."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))


def process_bytes() -> int:
    """The resident set of this process, or 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What a device has, and what of it is free now, in bytes."""

    total_bytes: int
    free_bytes: int


def capacity(device: torch.device) -> Capacity:
    """A device's memory: CUDA's from the driver, the host's from its cgroup's limit or its RAM."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Capacity(total_bytes=total, free_bytes=free)
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return Capacity(total_bytes=total, free_bytes=total - torch.mps.driver_allocated_memory())
    total, free = _host_memory()
    limit, used = _cgroup_memory()
    if limit is not None:
        total, free = min(total, limit), min(free, limit - used)
    return Capacity(total_bytes=total, free_bytes=max(0, free))


def _host_memory() -> tuple[int, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    return sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemFree"])


def _cgroup_memory() -> tuple[int | None, int]:
    """The limit and use of this process's cgroup (v2, then v1); no limit is None."""
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = Path(limit_file).read_text().strip(), Path(used_file).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and int(limit) < 2**60:
            return int(limit), int(used)
    return None, 0


def budget_bytes(budget: int | float | str, device: torch.device) -> int:
    """The bytes that a budget stands for on a device.

    Args:
        budget: `"22GiB"`, a count of bytes, a fraction of the device's memory in (0, 1], or `"auto"` (all
            that is free now). On CUDA it is for tensors: the context and other processes lie beside it, and a
            fraction or `"auto"` leaves room for them.
        device: whose memory it is.

    Raises:
        ValueError: the budget can't be read, is outside its range, or is more than the device has.
    """
    have, fixed = capacity(device), fixed_bytes(device)
    if budget == "auto":
        return have.free_bytes
    if isinstance(budget, float) and budget <= 1:
        return int(budget * have.total_bytes) - fixed
    size = parse_bytes(int(budget) if isinstance(budget, float) else budget)
    if size > have.total_bytes - fixed:
        beside = f", {format_bytes(fixed)} of which the driver holds" if fixed else ""
        raise ValueError(
            f"budget={budget!r} is more than {device} has ({format_bytes(have.total_bytes)}{beside}); "
            f'write a size up to that, a fraction such as 0.9, or "auto".'
        )
    return size


def check_budget(budget: object) -> None:
    """Refuse a budget that can't be read, before any device is looked at.

    Raises:
        ValueError: with the value, the rule and the remedy.
    """
    rule = (
        'a budget is a size such as "22GiB" (at least 64 KiB), a count of bytes, a fraction of the device in '
        '(0, 1], or "auto"'
    )
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise ValueError(f"budget={budget!r} is not a budget: {rule}.")
    if budget == "auto" or (isinstance(budget, float) and 0 < budget <= 1):
        return
    # YAML and command lines may hand a count of bytes over as a float.
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
        raise ValueError(f"budget={budget!r} is only {format_bytes(size)}: {rule}.")

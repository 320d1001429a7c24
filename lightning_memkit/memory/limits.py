"""The limits on a process's host and device memory, and a hard cap on the latter."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lightning_memkit.memory.cgroups import cgroup_folders
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.utilities.patching import Undo

try:
    import resource
except ImportError:  # Windows
    resource: Any = None


_UNLIMITED = 2**60  # cgroup v1 writes a number near 2**63 if there is no limit
_MPS_DEFAULT = 1.7  # torch's own high watermark, times the recommended size


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A limit on host memory, how much of it is free, and who sets it."""

    total_bytes: int
    free_bytes: int
    source: str


# Host


def host_limits(root: Path = Path("/")) -> list[Limit]:
    """Every limit on this process's host memory: RAM, its cgroups up to the outermost, its resource limits.

    A cgroup's reclaimable page cache counts as free.

    Args:
        root: the folder of `proc` and `sys`.
    """
    return [_ram(root), *_cgroups(root), *_resource_limits(root)]


def _ram(root: Path) -> Limit:
    try:
        sizes = _table(root / "proc/meminfo")
        total, free = sizes["MemTotal"] * 1024, sizes.get("MemAvailable", sizes.get("MemFree", 0)) * 1024
    except (OSError, KeyError):
        total = free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Limit(total_bytes=total, free_bytes=free, source="RAM")


def _cgroups(root: Path) -> Iterator[Limit]:
    unified, legacy = cgroup_folders(root, "memory", ("memory",))
    for folders, names in (
        (unified, ("memory.max", "memory.current", "inactive_file")),
        (unified, ("memory.high", "memory.current", "inactive_file")),
        (legacy, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ):
        for folder in folders:
            yield from _cgroup(folder, names)


def _cgroup(folder: Path, names: tuple[str, str, str]) -> Iterator[Limit]:
    limit_name, used_name, cache_name = names
    try:
        text = (folder / limit_name).read_text().strip()
        used = int((folder / used_name).read_text())
    except (OSError, ValueError):
        return
    if not text.isdigit() or int(text) >= _UNLIMITED:
        return
    try:
        cache = _table(folder / "memory.stat").get(cache_name, 0)
    except OSError:
        cache = 0
    free = int(text) - max(0, used - cache)
    yield Limit(total_bytes=int(text), free_bytes=free, source=f"{limit_name} of the cgroup {folder}")


def _resource_limits(root: Path) -> Iterator[Limit]:
    if resource is None:
        return
    try:
        used = _table(root / "proc/self/status")
    except OSError:
        used = {}
    for name, counted in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")):
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY and soft < _UNLIMITED:
            free = soft - used.get(counted, 0) * 1024
            yield Limit(total_bytes=soft, free_bytes=free, source=f"{name} (ulimit)")


def _table(path: Path) -> dict[str, int]:
    """The numbers of lines such as "MemTotal:  16 kB" or "inactive_file 4096"."""
    numbers: dict[str, int] = {}
    for line in path.read_text().splitlines():
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdigit():
            numbers[words[0]] = int(words[1])
    return numbers


# Devices


def device_memory(device: torch.device) -> tuple[int, int] | None:
    """(free, total) bytes of an accelerator from its driver; None if the driver does not tell.

    On a shared card, free is what all processes leave; on a MIG slice, it is the slice's.
    """
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return max(0, total - torch.mps.driver_allocated_memory()), total
    module = torch.get_device_module(device) if device.type != "cpu" else None
    if module is not None and hasattr(module, "mem_get_info"):
        return module.mem_get_info(device)
    return None


def reserved_bytes(device: torch.device) -> int:
    """What this process's caching allocator has reserved on a device; 0 if there is none."""
    module: Any = torch.get_device_module(device) if device.type not in ("cpu", "mps") else None
    return module.memory_reserved(device) if hasattr(module, "memory_reserved") else 0


def hard_cap(device: torch.device, budget_bytes: int) -> Undo:
    """Make torch's allocator refuse what exceeds a budget, as a smaller card would; returns the undo.

    On CUDA and XPU it sets the process's memory fraction, on Apple's GPUs the high watermark. A lower
    existing cap stays. With `expandable_segments:True` the cap is 20 MiB lower, by which such segments grow. On
    other devices nothing is capped, and the undo does nothing. The context, and libraries that allocate by
    themselves, are outside the cap.

    Args:
        device: the device whose memory is capped.
        budget_bytes: the most bytes that tensors, and the allocator's cache of them, may take.

    Raises:
        ValueError: this process's tensors exceed the budget already.
    """
    if device.type == "mps":
        return _cap_mps(budget_bytes)
    module: Any = torch.get_device_module(device) if device.type in ("cuda", "xpu") else None
    if module is None or not hasattr(module, "set_per_process_memory_fraction"):
        return lambda: None
    _check_held(module, device, budget_bytes)
    get: Any = getattr(module, "get_per_process_memory_fraction", lambda device: 1.0)
    before, total = float(get(device)), module.mem_get_info(device)[1]
    fraction = max(0, budget_bytes - _beyond_cap()) / total
    if fraction >= before:
        return lambda: None
    module.set_per_process_memory_fraction(fraction, device)
    return lambda: module.set_per_process_memory_fraction(before, device)


def _beyond_cap() -> int:
    """What the allocator may map beyond its cap: expandable segments grow by 20 MiB, rounded up after the check."""
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return 20 << 20 if "expandable_segments:true" in given.lower().replace(" ", "") else 0


def _check_held(module: ModuleType, device: torch.device, budget_bytes: int) -> None:
    # What an earlier run or a plan has cached would count. And weights that are put between what is left of it would
    # keep its segments for the whole run.
    module.empty_cache()
    held = module.memory_allocated(device)
    if held > budget_bytes:
        raise ValueError(
            f"budget={format_bytes(budget_bytes)} is less than the {format_bytes(held)} of tensors that this process "
            f"has on {device} already; delete what is not needed (models of earlier runs), or write a larger budget."
        )


def _cap_mps(budget_bytes: int) -> Undo:
    total = torch.mps.recommended_max_memory()
    # torch can't report its watermark, so read the one that the user may have set in the environment. 0 is no
    # limit.
    before = float(os.environ.get("PYTORCH_MPS_HIGH_WATERMARK_RATIO", _MPS_DEFAULT))
    fraction = budget_bytes / total
    if 0 < before <= fraction:
        return lambda: None
    torch.mps.set_per_process_memory_fraction(fraction)
    return lambda: torch.mps.set_per_process_memory_fraction(before)

"""How many processors this process may use, and how much processor time it wants."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from lightning_memkit.memory.cgroups import cgroup_folders

_SCHEDULED = Path("/proc/self/schedstat")


def wanted_processor_seconds() -> float:
    """Seconds that this process ran, plus those its main thread waited to run; costs microseconds.

    Waiting is included because a process that must share processors wants no less of them. If the system does
    not report waiting, only the seconds that it ran.
    """
    try:
        waited = int(_SCHEDULED.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        waited = 0.0
    return time.process_time() + waited


def usable_processors(root: Path = Path("/")) -> float:
    """Processors that this process may use, possibly a fraction under a cgroup's quota; above 0.

    Args:
        root: the folder of `proc` and `sys`.
    """
    return min([float(allowed_processors()), *quotas(root)])


def allowed_processors() -> int:
    """Processors on which this process may be scheduled, ignoring its cgroup's quota."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quotas(root: Path = Path("/")) -> Iterator[float]:
    """The processors' worth of time that each limiting cgroup of this process grants."""
    unified, legacy = cgroup_folders(root, "cpu", ("cpu", "cpu,cpuacct"))
    for folder in (*unified, *legacy):
        yield from _quota(folder)


def _quota(folder: Path) -> Iterator[float]:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return
    if quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0:
        yield int(quota) / int(period)

"""How many processors this process may use, and how much of them it wants."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

_SCHEDULED = Path("/proc/self/schedstat")


def wanted_processor_seconds() -> float:
    """Seconds for which this process's threads ran, and its main thread waited for a processor; microseconds.

    A process that has to share its processors wants no less of them. Where the system doesn't tell about the waiting,
    the seconds that it ran.
    """
    try:
        waited = int(_SCHEDULED.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        waited = 0.0
    return time.process_time() + waited


def usable_processors(root: Path = Path("/")) -> float:
    """Processors that this process may run on, or a share of them where a cgroup has a quota; above 0.

    Args:
        root: where `proc` and `sys` are.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(allowed), *_quotas(root)])


def _quotas(root: Path) -> Iterator[float]:
    """Of the cgroups that this process is in, v1 and v2, from the innermost to the mount's root."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    groups = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    v1 = next((path for _, controllers, path in groups if "cpu" in controllers.split(",")), "/")
    v2 = next((path for number, controllers, path in groups if number == "0" and not controllers), "/")
    base = root / "sys/fs/cgroup"
    for mount, path in ((base, v2), (base / "cpu", v1), (base / "cpu,cpuacct", v1)):
        # Within a container the path may be the host's, of which only the mount's root is visible.
        below = Path(path.lstrip("/"))
        for folder in [mount / part for part in (below, *below.parents)]:
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

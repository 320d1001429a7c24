"""The cgroup folders of this process, v1 and v2."""

from collections.abc import Iterator
from pathlib import Path


def cgroup_folders(root: Path, controller: str, mounts_v1: tuple[str, ...]) -> tuple[list[Path], list[Path]]:
    """The folders of v2, and of v1's controller, each from the innermost cgroup to the mount's root.

    Args:
        root: the folder of `proc` and `sys`.
        controller: the controller of v1, such as `memory`.
        mounts_v1: names under which it may be mounted.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    groups = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    v1 = next((path for _, controllers, path in groups if controller in controllers.split(",")), "/")
    v2 = next((path for number, controllers, path in groups if number == "0" and not controllers), "/")
    base = root / "sys/fs/cgroup"
    return list(_outwards(base, v2)), [
        folder for mount in mounts_v1 for folder in _outwards(base / mount, v1)
    ]


def _outwards(mount: Path, path: str) -> Iterator[Path]:
    # Within a container the path may be that of the host, where only the mount's root is visible.
    below = Path(path.lstrip("/"))
    return (mount / part for part in (below, *below.parents))

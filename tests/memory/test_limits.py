import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memkit.memory import limits

GiB = 2**30


def files(root: Path, **contents: str) -> None:
    """Write files; a double underscore in a name stands for a slash."""
    for name, text in contents.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def host(root: Path, groups: str, memory: str = "MemTotal: 67108864 kB\nMemAvailable: 62914560 kB\n") -> None:
    files(root, proc__meminfo=memory, proc__self__cgroup=groups, proc__self__status="VmSize: 1048576 kB\n")


def group(folder: Path, limit: int | str, used: int, cache: int = 0, *, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    for name, text in zip(
        (*names[:2], "memory.stat"), (limit, used, f"anon 5\n{names[2]} {cache}\n"), strict=True
    ):
        (folder / name).write_text(f"{text}\n")


def by_source(root: Path) -> dict[str, tuple[int, int]]:
    """(total, free) in GiB by the last two words of where a limit comes from."""
    found = limits.host_limits(root)
    return {
        one.source.replace(str(root), ""): (one.total_bytes // GiB, one.free_bytes // GiB) for one in found
    }


def test_nested_groups_of_v2_all_limit_up_to_the_root(tmp_path: Path) -> None:
    host(tmp_path, "0::/jobs/mine/step\n")
    base = tmp_path / "sys/fs/cgroup"
    group(base / "jobs", 16 * GiB, 15 * GiB)
    group(base / "jobs/mine", 8 * GiB, 6 * GiB, cache=4 * GiB)
    group(base / "jobs/mine/step", "max", 3 * GiB)
    assert by_source(tmp_path) == {
        "RAM": (64, 60),
        "memory.max of the cgroup /sys/fs/cgroup/jobs": (16, 1),
        "memory.max of the cgroup /sys/fs/cgroup/jobs/mine": (8, 6),  # 4 GiB of it are page cache
    }


def test_v1_is_read_from_its_own_mount_and_its_no_limit_is_none(tmp_path: Path) -> None:
    host(tmp_path, "5:cpu:/else\n4:memory,hugetlb:/box/inner\n0::/\n")
    base = tmp_path / "sys/fs/cgroup/memory"
    group(base, 2**63 - 4096, 20 * GiB, version=1)
    group(base / "box", 8 * GiB, 3 * GiB, version=1)
    group(base / "box/inner", 6 * GiB, 2 * GiB, cache=GiB, version=1)
    assert by_source(tmp_path) == {
        "RAM": (64, 60),
        "memory.limit_in_bytes of the cgroup /sys/fs/cgroup/memory/box": (8, 5),
        "memory.limit_in_bytes of the cgroup /sys/fs/cgroup/memory/box/inner": (6, 5),
    }


def test_in_a_container_that_sees_the_host_s_path_the_mount_s_root_counts(tmp_path: Path) -> None:
    host(tmp_path, "0::/kubepods/pod1/container\n")
    group(tmp_path / "sys/fs/cgroup", 4 * GiB, GiB)
    assert by_source(tmp_path)["memory.max of the cgroup /sys/fs/cgroup"] == (4, 3)


def test_throttling_is_a_limit_too(tmp_path: Path) -> None:
    host(tmp_path, "0::/job\n")
    folder = tmp_path / "sys/fs/cgroup/job"
    group(folder, "max", GiB)
    (folder / "memory.high").write_text(str(2 * GiB))
    assert by_source(tmp_path)["memory.high of the cgroup /sys/fs/cgroup/job"] == (2, 1)


def test_a_system_without_these_files_has_its_ram() -> None:
    found = limits.host_limits(Path("/nowhere"))
    assert found[0].source == "RAM"
    assert found[0].total_bytes > 2**26


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits")
def test_resource_limits_count_what_the_process_has_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host(tmp_path, "0::/\n")
    unlimited = limits.resource.RLIM_INFINITY
    soft = {limits.resource.RLIMIT_AS: 4 * GiB, limits.resource.RLIMIT_DATA: unlimited}
    monkeypatch.setattr(limits.resource, "getrlimit", lambda kind: (soft[kind], unlimited))
    assert by_source(tmp_path) == {"RAM": (64, 60), "RLIMIT_AS (ulimit)": (4, 3)}


# The device's cap


class Card:
    """Stands for `torch.cuda` on a card of 80 GiB, with 10 GiB reserved of which 6 are tensors."""

    def __init__(self, fraction: float = 1.0) -> None:
        self.fraction = fraction
        self.reserved, self.allocated = 10 * GiB, 6 * GiB

    def mem_get_info(self, device: object) -> tuple[int, int]:
        return 30 * GiB, 80 * GiB

    def memory_reserved(self, device: object) -> int:
        return self.reserved

    def memory_allocated(self, device: object) -> int:
        return self.allocated

    def empty_cache(self) -> None:
        self.reserved = self.allocated

    def get_per_process_memory_fraction(self, device: object) -> float:
        return self.fraction

    def set_per_process_memory_fraction(self, fraction: float, device: object) -> None:
        self.fraction = fraction


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_budget_becomes_the_process_s_fraction_of_the_card(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    card = Card()
    monkeypatch.setattr(torch, "get_device_module", lambda device: card)
    undo = limits.hard_cap(torch.device(kind, 0), 24 * GiB)
    assert card.fraction == 0.3
    undo()
    assert card.fraction == 1.0


def test_a_lower_cap_of_the_user_s_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(fraction=0.25)
    monkeypatch.setattr(torch, "get_device_module", lambda device: card)
    undo = limits.hard_cap(torch.device("cuda"), 24 * GiB)
    assert card.fraction == 0.25
    undo()
    assert card.fraction == 0.25


def test_a_budget_below_what_is_held_already_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card()
    monkeypatch.setattr(torch, "get_device_module", lambda device: card)
    limits.hard_cap(torch.device("cuda"), 8 * GiB)
    assert card.reserved == 6 * GiB  # the cache had to go
    card.reserved = 7 * GiB
    limits.hard_cap(torch.device("cuda"), 8 * GiB)
    assert card.reserved == 6 * GiB  # an earlier run's, between which weights would be put
    with pytest.raises(ValueError, match=r"less than the 6.00 GiB of tensors .* on cuda already; delete"):
        limits.hard_cap(torch.device("cuda"), 5 * GiB)


def test_on_apple_s_gpus_the_watermark_moves_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[float] = []
    mps: Any = torch.mps
    monkeypatch.setattr(mps, "recommended_max_memory", lambda: 16 * GiB)
    monkeypatch.setattr(mps, "driver_allocated_memory", lambda: 4 * GiB)
    monkeypatch.setattr(mps, "set_per_process_memory_fraction", set_to.append)
    monkeypatch.delenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", raising=False)
    assert limits.device_memory(torch.device("mps")) == (12 * GiB, 16 * GiB)
    limits.hard_cap(torch.device("mps"), 8 * GiB)()
    assert set_to == [0.5, 1.7]
    monkeypatch.setenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0.4")
    limits.hard_cap(torch.device("mps"), 8 * GiB)()
    assert set_to == [0.5, 1.7]


def test_expandable_segments_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """They grow by 20 MiB, and are rounded up after the allocator has compared them with its cap."""
    card = Card()
    monkeypatch.setattr(torch, "get_device_module", lambda device: card)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True")
    limits.hard_cap(torch.device("cuda"), 24 * GiB)
    assert round(card.fraction * 80 * GiB) == 24 * GiB - (20 << 20)


def test_the_host_is_not_capped() -> None:
    limits.hard_cap(torch.device("cpu"), GiB)()
    assert limits.device_memory(torch.device("cpu")) is None
    assert limits.reserved_bytes(torch.device("cpu")) == 0

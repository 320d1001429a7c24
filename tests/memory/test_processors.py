import os
import time
from pathlib import Path

import pytest

from lightning_memkit.memory import processors
from lightning_memkit.memory.processors import usable_processors, wanted_processor_seconds


def machine(root: Path, group: str, files: dict[str, str]) -> Path:
    """A file system with this /proc/self/cgroup and these files below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(group)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture(autouse=True)
def eight_processors(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/", {}, 8),
        ("0::/job/step", {"job/step/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/job/step", {"job/cpu.max": "300000 100000\n", "job/step/cpu.max": "max 100000\n"}, 3),
        ("0::/job/step", {"job/cpu.max": "200000 100000", "job/step/cpu.max": "400000 100000"}, 2),
        ("0::/of/the/host", {"cpu.max": "50000 100000\n"}, 0.5),  # in a container
        ("0::/", {"cpu.max": "3200000 100000\n"}, 8),  # more than the affinity
        (
            "4:cpu,cpuacct:/docker/a",
            {"cpu/docker/a/cpu.cfs_quota_us": "250000\n", "cpu/docker/a/cpu.cfs_period_us": "100000\n"},
            2.5,
        ),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ("0::/", {"cpu.max": "not a quota\n"}, 8),
    ],
)
def test_the_narrowest_of_affinity_and_quotas_counts(tmp_path, group, files, expected):
    assert usable_processors(machine(tmp_path, group, files)) == expected


def test_without_cgroups_the_affinity_counts(tmp_path):
    assert usable_processors(tmp_path) == 8


def test_a_system_without_affinity_counts_its_processors(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert usable_processors(tmp_path) == 5


def test_waiting_for_a_processor_counts_as_wanting_it(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "process_time", lambda: 2.0)
    monkeypatch.setattr(processors, "_SCHEDULED", tmp_path / "schedstat")
    assert wanted_processor_seconds() == 2.0
    (tmp_path / "schedstat").write_text("1999000000 500000000 17\n")
    assert wanted_processor_seconds() == 2.5
    (tmp_path / "schedstat").write_text("")
    assert wanted_processor_seconds() == 2.0

"""Devices by the names that drivers and people give them."""

import pytest

from lightning_memkit import Budget
from lightning_memkit.prediction.devices import DEVICES, described, device_named, most_like

GIB = 1 << 30


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("rtx4090", "rtx4090"), ("RTX 4090", "rtx4090"), ("rtx-4090", "rtx4090"), ("4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"), ("rtx5090", "rtx5090"), ("h100", "h100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"), ("H200", "h200"), ("A100 40 GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("a100_80gb", "a100-80gb"), ("A100-PCIE-40GB", "a100-40gb"),
        ("Tesla T4", "t4"), ("NVIDIA L4", "l4"), ("L40S", "l40s"), ("RTX A6000", "a6000"), ("A10", "a10"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"), ("v100 32gb", "v100-32gb"),
        ("NVIDIA B200", "b200"), ("mi300x", "mi300x"), ("AMD Instinct MI300X", "mi300x"),
    ],
)  # fmt: skip
def test_it_is_found(written: str, name: str) -> None:
    assert device_named(written).name == name


def test_every_device_has_its_own_name() -> None:
    assert [device_named(name).name for name in DEVICES] == list(DEVICES)


@pytest.mark.parametrize(
    ("written", "names"), [("a100", "a100-80gb or a100-40gb"), ("Tesla V100", "v100-32gb or v100-16gb")]
)
def test_where_memory_differs_it_is_asked(written: str, names: str) -> None:
    with pytest.raises(ValueError, match=f"device='{written}' may be {names}: write which"):
        device_named(written)


@pytest.mark.parametrize(
    "written", ["H100 PCIe", "RTX 3090 Ti", "RTX 4090 Laptop", "A10G", "T400", "L40", "gaudi 2", "", "gb"]
)
def test_others_are_unknown(written: str) -> None:
    with pytest.raises(ValueError, match="is unknown.*; known are h200"):
        device_named(written)


def test_a_slip_is_told() -> None:
    with pytest.raises(ValueError, match=r"\(did you mean 'rtx4090'\?\)"):
        device_named("rtx409")


def test_a_card_of_this_machine_has_its_own_memory_and_the_nearest_rates() -> None:
    found = most_like("NVIDIA H100 PCIe", 79 * GIB)
    assert (found.name, found.memory_bytes) == ("h100-80gb", 79 * GIB)
    assert most_like("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20 * GIB).name == "a100-40gb"
    assert most_like("Quadro GV100", 32 * GIB).name in DEVICES


@pytest.mark.parametrize(
    ("memory", "size"),
    [
        ("24M", 24_000_000), ("12 gigabytes", 12 * 10**9), ("50%", 24_564 * 2**20 // 2), (0.5, 24_564 * 2**20 // 2),
        ("0.5", 24_564 * 2**20 // 2), (16e9, 16 * 10**9), ("16e9", 16 * 10**9), ("8GiB", 8 * GIB),
    ],
)  # fmt: skip
def test_budgets_as_people_write_them(memory: str | float, size: int) -> None:
    assert Budget(memory, "RTX 4090").bytes() == size


def test_a_device_is_described_by_its_memory() -> None:
    """A known one keeps its speed, an unknown one has that of the nearest memory."""
    assert described("rtx4090", None) == "rtx4090"
    assert described("4090", "48GiB") == device_named("rtx4090", "48GiB")
    unknown = described("Titan Z", "24GiB")
    assert not isinstance(unknown, str)
    assert (unknown.name, unknown.memory_bytes) == ("Titan Z", 24 * GIB)
    assert unknown.bytes_per_second == device_named("rtx3090").bytes_per_second
    assert getattr(described("auto", "15GiB"), "name", "") == "a card of 15.00 GiB"


@pytest.mark.parametrize(("device", "memory"), [("cpu", "4GiB"), ("Titan Z", "much")])
def test_what_describes_nothing_is_refused(device: str, memory: str) -> None:
    with pytest.raises(ValueError, match=f"memory='{memory}'|'{memory}'"):
        described(device, memory)

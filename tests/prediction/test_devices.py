"""Devices by the names that drivers and people give them."""

import re
from pathlib import Path

import pytest

from lightning_memkit import Budget
from lightning_memkit.prediction.data_sheets import SHEETS
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
        ("3090ti", "rtx3090ti"), ("3090 Ti", "rtx3090ti"), ("RTX 3090 Ti", "rtx3090ti"), ("3060", "rtx3060"),
        ("4070 super", "rtx4070super"), ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070tisuper"), ("4080", "rtx4080"),
        ("rtx 3080 12gb", "rtx3080-12gb"), ("4060ti 16 GB", "rtx4060ti-16gb"), ("5060ti 8g", "rtx5060ti-8gb"),
        ("2080ti", "rtx2080ti"), ("GTX 1080 Ti", "gtx1080ti"), ("NVIDIA TITAN RTX", "titanrtx"), ("titan v", "titanv"),
        ("rtx 8000", "rtx8000"), ("Quadro RTX 8000", "rtx8000"), ("rtx a5000", "a5000"), ("a4000", "a4000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"), ("pro 6000", "rtxpro6000"), ("L40", "l40"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"), ("NVIDIA A10G", "a10g"),
        ("H100 PCIe", "h100pcie"), ("h100 nvl", "h100nvl"), ("h800", "h800"), ("a800 80GB", "a800-80gb"),
        ("NVIDIA GH200 480GB", "gh200"), ("NVIDIA B300 SXM6 AC", "b300"), ("Tesla P100-PCIE-16GB", "p100pcie"),
        ("Tesla V100-PCIE-32GB", "v100pcie-32gb"), ("a40 pcie", "a40"), ("l40s 48GB", "l40s"), ("h200 141gb", "h200"),
        ("AMD Instinct MI355X OAM", "mi355x"),
    ],
)  # fmt: skip
def test_it_is_found(written: str, name: str) -> None:
    assert device_named(written).name == name


def test_every_device_has_its_own_name() -> None:
    assert [device_named(name).name for name in DEVICES] == list(DEVICES)


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ("a100", "a100-80gb or a100-40gb"), ("Tesla V100", "v100-32gb or v100-16gb"),
        ("3080", "rtx3080-12gb or rtx3080-10gb"), ("4060 Ti", "rtx4060ti-16gb or rtx4060ti-8gb"),
        ("a800", "a800-80gb or a800-40gb"), ("rtx 6000", "rtx6000ada or a6000 or rtxpro6000"),
    ],
)  # fmt: skip
def test_where_memory_differs_it_is_asked(written: str, names: str) -> None:
    with pytest.raises(ValueError, match=f"device='{written}' may be {names}: write which"):
        device_named(written)


@pytest.mark.parametrize(
    "written",
    [
        "T400",
        "gaudi 2",
        "",
        "gb",
        "b100",
        "gb10",
        "rtx9090",
        "h900",
        "rtx409",
        "l20",
        "H800 PCIe",
        "7900 xtx",
    ],
)
def test_others_are_unknown_and_resemble_none(written: str) -> None:
    with pytest.raises(ValueError, match=r"is unknown; .*--memory 24GiB.*Device\(name="):
        device_named(written)


@pytest.mark.parametrize(("written", "name"), [("rxt4090", "rtx4090"), ("a6000 ada", "rtx6000ada")])
def test_a_slip_of_letters_is_told(written: str, name: str) -> None:
    with pytest.raises(ValueError, match=rf"\(did you mean '{name}'\?\)"):
        device_named(written)


@pytest.mark.parametrize(
    "written",
    [
        "rtx4090 mobile",
        "RTX 4090 Laptop GPU",
        "4090m",
        "RTX 3080 Max-Q",
        "NVIDIA GeForce RTX 3070 Laptop GPU",
    ],
)
def test_a_laptop_s_chip_is_not_the_card_of_its_name(written: str) -> None:
    with pytest.raises(ValueError, match="is a laptop's or a Max-Q chip.*--memory 24GiB"):
        device_named(written)
    assert device_named(described(written, "16GiB")).memory_bytes == 16 * GIB


@pytest.mark.parametrize(
    ("written", "one"),
    [
        ("8xh100", "h100"), ("8 x h100", "h100"), ("h100x8", "h100"), ("h100,h100", "h100"), ("2 4090", "4090"),
        ("4x 4090", "4090"), ("h100 + a100", "h100"),
    ],
)  # fmt: skip
def test_several_cards_are_a_number_of_devices(written: str, one: str) -> None:
    for asked in (lambda: device_named(written), lambda: described(written, "80GiB")):
        with pytest.raises(
            ValueError, match=rf"several cards; write one, device='{one}': .*--trainer.devices 8"
        ):
            asked()


def test_a_card_of_another_memory_is_asked_for_by_its_size() -> None:
    with pytest.raises(ValueError, match=r"has another memory than rtx3060's 12.00 GiB: .*--memory SIZE"):
        device_named("rtx 3060 8gb")
    assert device_named(described("rtx 3060", "8GiB")).memory_bytes == 8 * GIB


def test_a_mac_s_gpu_is_described_by_hand() -> None:
    with pytest.raises(ValueError, match=r"device='mps': .*device='cpu', or give its memory.*Device\(name="):
        device_named("mps")


@pytest.mark.parametrize(
    "written", ["rtx9090", "8xh100", "rtx 4090 laptop", "rtx 3060 8gb", "mps", "cuda:7", "3080", "rtx 6000"]
)
def test_a_refusal_fits_three_lines(written: str) -> None:
    with pytest.raises(ValueError, match=written) as refused:
        device_named(written)
    assert len(str(refused.value)) < 3 * 120 - len("memkit: error: ")


def test_every_device_has_a_source_and_rates_of_its_kind() -> None:
    for source, _, rows in SHEETS:
        assert re.search("data sheet|white paper|specifications|product brief", source), rows
    for name, one in DEVICES.items():
        assert 1 <= one.flops_16 / one.flops_32 < 37, name  # B200's tensor cores against its others
        assert 200e9 <= one.bytes_per_second <= 8e12, name


def test_what_has_been_known_for_long_is_the_same() -> None:
    rates = {
        "h200": (143_771, 989e12, 67e12, 4.8e12, 50e9, 450e9), "b200": (183_359, 2.25e15, 75e12, 7.7e12, 50e9, 900e9),
        "mi300x": (196_592, 1.307e15, 163.4e12, 5.3e12, 50e9, 448e9),
        "a6000": (49_140, 154.8e12, 38.7e12, 768e9, 25e9, 25e9),
        "rtx5090": (32_607, 209.5e12, 104.8e12, 1.792e12, 50e9, 25e9),
        "rtx4090": (24_564, 165.2e12, 82.6e12, 1.008e12, 25e9, 25e9), "t4": (15_360, 65e12, 8.1e12, 320e9, 12e9, 12e9),
        "v100-16gb": (16_160, 125e12, 15.7e12, 900e9, 12e9, 150e9),
        "a100-40gb": (40_960, 312e12, 19.5e12, 1.555e12, 25e9, 300e9),
    }  # fmt: skip
    for name, (mib, *figures) in rates.items():
        one = DEVICES[name]
        links = one.host_bytes_per_second, one.link_bytes_per_second
        assert one.memory_bytes == mib * 2**20, name
        assert [one.flops_16, one.flops_32, one.bytes_per_second, *links] == figures, name


def test_a_card_of_this_machine_has_its_own_memory_and_the_nearest_rates() -> None:
    found = most_like("NVIDIA H100 PCIe", 79 * GIB)
    assert (found.name, found.memory_bytes) == ("h100pcie", 79 * GIB)
    assert most_like("NVIDIA GeForce RTX 4090 Laptop GPU", 16 * GIB).name == "rtx4090"
    assert most_like("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96 * GIB).name == "rtxpro6000"
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
    """A known one keeps its speed, an unknown one has that of the nearest memory among cards with bfloat16."""
    assert described("rtx4090", None) == "rtx4090"
    assert described("4090", "48GiB") == device_named("rtx4090", "48GiB")
    unknown = described("Titan Z", "24GiB")
    assert not isinstance(unknown, str)
    assert (unknown.name, unknown.memory_bytes) == ("Titan Z", 24 * GIB)
    assert unknown.bytes_per_second == device_named("rtx3090").bytes_per_second
    assert getattr(described("auto", "15GiB"), "name", "") == "a card of 15.00 GiB"


@pytest.mark.parametrize("memory", ["8GiB", "12GiB", "15GiB", "16GiB", "32GiB"])
def test_an_unknown_card_has_bfloat16_and_says_whose_rates_it_has(memory: str) -> None:
    """A V100 or T4 of the same memory lent it their lack of bfloat16."""
    found = device_named(described("rtx 9060", memory))
    assert found.has_bfloat16
    assert found.flops_16 == DEVICES[found.rates_of].flops_16
    assert device_named(described("4090", memory)).rates_of == ""


@pytest.mark.parametrize(("device", "memory"), [("cpu", "4GiB"), ("Titan Z", "much")])
def test_what_describes_nothing_is_refused(device: str, memory: str) -> None:
    with pytest.raises(ValueError, match=f"memory='{memory}'|'{memory}'"):
        described(device, memory)


def test_the_docs_list_every_device() -> None:
    page = (Path(__file__).parents[2] / "docs" / "techniques" / "prediction.md").read_text()
    rows = re.findall(r"^\| (?:data centers|AMD|workstations|GeForce) \| (.*) \|$", page, re.MULTILINE)
    listed = re.findall(r"`([^`]+)`", " ".join(rows))
    assert sorted(listed) == sorted(DEVICES)

"""Devices for which training can be predicted, described by their makers' data sheets."""

import re
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from lightning_memkit.memory.cublas import WORKSPACE_BYTES, WORKSPACE_BYTES_HOPPER, WORKSPACE_BYTES_MI300
from lightning_memkit.memory.units import format_bytes, parse_bytes

_MIB = 1 << 20
_OTHER_BOARDS = re.compile(r"\b(pcie|nvl|laptop|max q|4090 d|ti|super|ada)\b")  # variants with other rates


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device: its memory, its speed, and what it takes before the first tensor.

    Rates are the data sheets' dense peaks. The size of a context is known only to the driver: it was measured
    on an H200, and is a typical value elsewhere.

    Attributes:
        name: A key of `DEVICES`, or a name of one's own.
        memory_bytes: The total that the driver reports.
        context_bytes: What a CUDA context takes, with torch's kernels loaded.
        library_bytes: A workspace of the matrix library (cuBLAS), which stays in torch's allocator once it
            was used. The forward's thread has one, the backward's another.
        flops_16: FLOPs a second of matrix products in bfloat16 or float16 with float32 accumulation.
        flops_32: The same in float32, without TF32.
        bytes_per_second: Bandwidth of the device's memory.
        host_bytes_per_second: Bandwidth of copies to and from pinned host memory.
        link_bytes_per_second: Bandwidth to other devices of the node, in one direction.
        network_bytes_per_second: Bandwidth to devices of other nodes.
        has_bfloat16: Whether it supports matrix products in bfloat16.
        prefers_cudnn: Whether attention in 16 bits takes cuDNN's kernel first, with a mask or without, as torch
            does on Hopper and on data centers' Blackwell.

    Raises:
        ValueError: a size or rate is not positive, or the context is larger than the memory.
    """

    name: str
    memory_bytes: int
    context_bytes: int = 500 * _MIB
    library_bytes: int = WORKSPACE_BYTES
    flops_16: float
    flops_32: float
    bytes_per_second: float
    host_bytes_per_second: float = 25e9
    link_bytes_per_second: float = 25e9
    network_bytes_per_second: float = 12.5e9
    has_bfloat16: bool = True
    prefers_cudnn: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "float", int, float) and value <= 0:
                raise ValueError(f"{field.name}={value} of device {self.name!r} is not positive.")
        if self.context_bytes + self.library_bytes >= self.memory_bytes:
            raise ValueError(
                f"The context of device {self.name!r} ({format_bytes(self.context_bytes)}) leaves nothing of its "
                f"{format_bytes(self.memory_bytes)}; check memory_bytes and context_bytes."
            )

    @property
    def usable_bytes(self) -> int:
        """What remains for tensors, and for the allocator's cache of them."""
        return self.memory_bytes - self.context_bytes


# Memory: as nvidia-smi reports it. Workspaces of the matrix library: torch's default (`memory/cublas.py`).
# Links: NVLink, else PCIe. Networks: 400 Gbit/s for each device of a cluster, else 100 Gbit/s.
_HOPPER: dict[str, Any] = {
    "context_bytes": 620 * _MIB,  # an H200 with torch 2.11 and CUDA 13 took 619
    "flops_16": 989e12,
    "flops_32": 67e12,
    "library_bytes": WORKSPACE_BYTES_HOPPER,
    "prefers_cudnn": True,
    "host_bytes_per_second": 50e9,  # an H200 copied 53e9 each way
    "link_bytes_per_second": 450e9,
    "network_bytes_per_second": 50e9,
}
_AMPERE: dict[str, Any] = {
    "flops_16": 312e12,
    "flops_32": 19.5e12,
    "link_bytes_per_second": 300e9,
    "network_bytes_per_second": 50e9,
}
_VOLTA: dict[str, Any] = {
    "flops_16": 125e12,
    "flops_32": 15.7e12,
    "bytes_per_second": 900e9,
    "host_bytes_per_second": 12e9,
    "link_bytes_per_second": 150e9,
    "has_bfloat16": False,
}
DEVICES = {
    device.name: device
    for device in (
        Device(name="h200", memory_bytes=143_771 * _MIB, bytes_per_second=4.8e12, **_HOPPER),
        Device(
            name="b200",
            memory_bytes=183_359 * _MIB,
            flops_16=2.25e15,
            flops_32=75e12,
            bytes_per_second=7.7e12,
            host_bytes_per_second=50e9,
            link_bytes_per_second=900e9,
            network_bytes_per_second=50e9,
            prefers_cudnn=True,
        ),
        Device(
            name="mi300x",
            memory_bytes=196_592 * _MIB,
            library_bytes=WORKSPACE_BYTES_MI300,
            flops_16=1.307e15,
            flops_32=163.4e12,
            bytes_per_second=5.3e12,
            host_bytes_per_second=50e9,
            link_bytes_per_second=448e9,
            network_bytes_per_second=50e9,
        ),
        Device(name="h100-80gb", memory_bytes=81_559 * _MIB, bytes_per_second=3.35e12, **_HOPPER),
        Device(name="a100-80gb", memory_bytes=81_920 * _MIB, bytes_per_second=2.039e12, **_AMPERE),
        Device(name="a100-40gb", memory_bytes=40_960 * _MIB, bytes_per_second=1.555e12, **_AMPERE),
        Device(
            name="l40s",
            memory_bytes=46_068 * _MIB,
            flops_16=362e12,
            flops_32=91.6e12,
            bytes_per_second=864e9,
        ),
        Device(
            name="a6000",
            memory_bytes=49_140 * _MIB,
            flops_16=154.8e12,
            flops_32=38.7e12,
            bytes_per_second=768e9,
        ),
        Device(
            name="rtx5090",
            memory_bytes=32_607 * _MIB,
            flops_16=209.5e12,
            flops_32=104.8e12,
            bytes_per_second=1.792e12,
            host_bytes_per_second=50e9,
        ),
        Device(
            name="rtx4090",
            memory_bytes=24_564 * _MIB,
            flops_16=165.2e12,
            flops_32=82.6e12,
            bytes_per_second=1.008e12,
        ),
        Device(
            name="rtx3090",
            memory_bytes=24_576 * _MIB,
            flops_16=71e12,
            flops_32=35.6e12,
            bytes_per_second=936e9,
        ),
        Device(
            name="l4",
            memory_bytes=23_034 * _MIB,
            flops_16=121e12,
            flops_32=30.3e12,
            bytes_per_second=300e9,
        ),
        Device(
            name="a10",
            memory_bytes=23_028 * _MIB,
            flops_16=125e12,
            flops_32=31.2e12,
            bytes_per_second=600e9,
        ),
        Device(name="v100-32gb", memory_bytes=32_510 * _MIB, **_VOLTA),
        Device(name="v100-16gb", memory_bytes=16_160 * _MIB, **_VOLTA),
        Device(
            name="t4",
            memory_bytes=15_360 * _MIB,
            flops_16=65e12,
            flops_32=8.1e12,
            bytes_per_second=320e9,
            host_bytes_per_second=12e9,
            link_bytes_per_second=12e9,
            has_bfloat16=False,
        ),
    )
}


def device_named(device: "str | Device", memory: int | str | None = None) -> Device:
    """The known device that a name means ("RTX 4090", "NVIDIA H100 80GB HBM3"), or the given `Device`.

    Args:
        device: the name, or the device.
        memory: in the place of its own, as a size.

    Raises:
        ValueError: the name is unknown, or several have it.
    """
    found = device if isinstance(device, Device) else _named(device)
    return found if memory is None else replace(found, memory_bytes=parse_bytes(memory))


def _named(device: str) -> Device:
    known = DEVICES.get(device.lower())
    found = devices_meant(device) if known is None else [known]
    if len(found) > 1:
        names = " or ".join(one.name for one in found)
        raise ValueError(f"device={device!r} may be {names}: write which, since their memory differs.")
    if not found:
        close = get_close_matches(device.lower(), DEVICES, n=1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(
            f"device={device!r} is unknown{meant}; known are {', '.join(DEVICES)}. Give its memory as well "
            "(--memory 24GiB), or describe it: Device(name=, memory_bytes=, flops_16=, ...)."
        )
    return found[0]


def described(device: str, memory: int | str | None) -> "str | Device":
    """What `Budget` takes for a device and its memory as they were written; without a memory the device's name.

    Args:
        device: a name, known or not; "auto" for a card of which nothing but its memory is known.
        memory: as a size. A known device keeps its speed; an unknown one has that of the known one whose memory is
            nearest, so that its times are rough.

    Raises:
        ValueError: the memory is no size, or belongs to a CPU.
    """
    if memory is None:
        return device
    if device == "cpu":
        raise ValueError(
            f"memory={memory!r} is a card's, and device='cpu' has the host's: give a budget instead."
        )
    size = parse_bytes(memory)
    if device != "auto" and len(devices_meant(device)) == 1:
        return device_named(device, size)
    return replace(
        most_like(device, size), name=f"a card of {format_bytes(size)}" if device == "auto" else device
    )


def devices_meant(words: str, *, any_board: bool = False) -> list[Device]:
    """The known devices that a driver's or a person's words mean: "NVIDIA A100-SXM4-80GB", "A100", "4090".

    Args:
        words: the name.
        any_board: also for variants of a chip with other rates ("H100 PCIe", "RTX 3090 Ti").
    """
    plain = re.sub(r"[^a-z0-9]+", " ", words.lower())
    found = [one for known, one in DEVICES.items() if re.search(_pattern(known), plain)]
    if not any_board and _OTHER_BOARDS.search(plain):
        found = [one for one in found if one.name.startswith("a100")]  # whose variants have the same rates
    said = [
        one for one in found if re.search(rf"\b{one.name.partition('-')[2]}\b", plain.replace(" gb", "gb"))
    ]
    return [one for one in said if "-" in one.name] or found


def most_like(name: str, memory_bytes: int) -> Device:
    """The data sheet of a driver's name, or of the known device with the most similar memory; with that memory."""
    meant = devices_meant(name, any_board=True) or DEVICES.values()
    nearest = min(meant, key=lambda one: abs(one.memory_bytes - memory_bytes))
    return replace(nearest, memory_bytes=memory_bytes)


def _pattern(known: str) -> str:
    """A pattern for other spellings: `rtx4090` matches "RTX 4090" and "4090"."""
    name = known.partition("-")[0]
    name = (
        re.sub(r"^rtx", "(rtx ?)?", name)
        if name.startswith("rtx")
        else re.sub(r"(?<=[a-z])(?=\d\d)", " ?", name)
    )
    return rf"\b{name}\b"

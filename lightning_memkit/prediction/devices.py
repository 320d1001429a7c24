"""Devices for which training can be predicted, described by their makers' data sheets."""

from dataclasses import dataclass, fields, replace
from typing import Any

from lightning_memkit.memory.cublas import WORKSPACE_BYTES, WORKSPACE_BYTES_HOPPER
from lightning_memkit.memory.units import format_bytes, parse_bytes

_MIB = 1 << 20


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
            does on Hopper.

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
DEVICES = {
    device.name: device
    for device in (
        Device(name="h200", memory_bytes=143_771 * _MIB, bytes_per_second=4.8e12, **_HOPPER),
        Device(name="h100-80gb", memory_bytes=81_559 * _MIB, bytes_per_second=3.35e12, **_HOPPER),
        Device(name="a100-80gb", memory_bytes=81_920 * _MIB, bytes_per_second=2.039e12, **_AMPERE),
        Device(name="a100-40gb", memory_bytes=40_960 * _MIB, bytes_per_second=1.555e12, **_AMPERE),
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
    """The known device with this name, or the given `Device`; `memory` replaces its memory.

    Raises:
        ValueError: the name is unknown.
    """
    if isinstance(device, str):
        found = DEVICES.get(device.lower())
        if found is None:
            raise ValueError(
                f"device={device!r} is unknown; known are {', '.join(DEVICES)}. Describe another: "
                "Device(name=, memory_bytes=, flops_16=, flops_32=, bytes_per_second=)."
            )
        device = found
    return device if memory is None else replace(device, memory_bytes=parse_bytes(memory))

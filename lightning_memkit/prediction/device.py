"""A device, as a prediction sees it: its memory, its rates, and what it takes before the first tensor."""

from dataclasses import dataclass, fields

from lightning_memkit.memory.cublas import WORKSPACE_BYTES
from lightning_memkit.memory.units import format_bytes

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
            does on Hopper and on data centers' Blackwell.
        rates_of: The device whose rates and abilities these are, where its own are not known; else empty.

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
    rates_of: str = ""

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

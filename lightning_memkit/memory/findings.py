"""A finding of waste in training, in one line: what it is, its bytes, where it is made, and the remedy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from lightning_memkit.memory.units import format_bytes

Kind = Literal[
    "logits_upcast", "foreach_copies", "dense_mask", "zeroed_gradients", "kept_tensors", "fragmentation"
]
_WASTED_SHARE = 0.10  # of the reserved bytes; every caching allocator has some slack


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding of a lint.

    Args:
        kind: which lint it was.
        what: the wasteful thing, as the subject of a line.
        size_bytes: its bytes.
        where: `file:line` in the user's code, or the phase if no line of theirs is involved.
        remedy: what to write instead.
    """

    kind: Kind
    what: str
    size_bytes: int
    where: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {format_bytes(self.size_bytes)}, {self.where}; {self.remedy}"


def fragmentation_of(device: torch.device) -> tuple[Finding, ...]:
    """The `fragmentation` of a device's allocator so far; empty unless the device is a CUDA GPU."""
    found = fragmentation(torch.cuda.memory_stats(device)) if device.type == "cuda" else None
    return () if found is None else (found,)


def fragmentation(stats: Mapping[str, int]) -> Finding | None:
    """What CUDA's caching allocator reserved at its peak and could not use; None if that is little.

    Not yet verified on a GPU.

    Args:
        stats: of `torch.cuda.memory_stats(device)`; empty for devices that keep none.
    """
    reserved = stats.get("reserved_bytes.all.peak", 0)
    wasted = reserved - stats.get("allocated_bytes.all.peak", reserved)
    if wasted <= _WASTED_SHARE * reserved:
        return None
    return Finding(
        kind="fragmentation",
        what="Reserved by the allocator and never in use at once",
        size_bytes=wasted,
        where=f"{format_bytes(reserved)} reserved at the peak",
        remedy="set PYTORCH_ALLOC_CONF=expandable_segments:True before the first tensor is made",
    )

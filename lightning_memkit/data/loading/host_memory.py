"""The host memory of a loader's worker processes, and the sizes of parts of batches if whole ones need too much.

A finished batch waits in shared memory (``/dev/shm`` on Linux), which is RAM, too. With ``num_workers``
processes that each work ``prefetch`` batches ahead, all of these batches may wait at once.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from lightning_memkit.memory.limits import host_limits
from lightning_memkit.memory.units import format_bytes, parse_bytes

_BYTES_A_TOKEN = 24  # input_ids, labels and position_ids, int64 each
_BUILDING = 2  # a batch under construction needs its indices and sources beside itself
_RECEIVED = 2  # the one in use, and one that was received ahead
_SHARE_OF_FREE = 0.5  # of the free memory: the model and the optimizer come later
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """The most memory that a loader uses at once.

    Attributes:
        shared_bytes: In shared memory: batches that wait or are being sent.
        ram_bytes: In RAM, shared memory included.
    """

    shared_bytes: int
    ram_bytes: int

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.ram_bytes)} of RAM, {format_bytes(self.shared_bytes)} of it in shared memory"
        )


def loader_memory(
    tokens: int,
    *,
    num_workers: int,
    prefetch: int = 2,
    tokens_a_part: int | None = None,
    pinned: bool = False,
) -> HostMemory:
    """The memory of a loader with batches of this many tokens, padding included.

    Args:
        tokens: Tokens a batch.
        num_workers: Processes that build ahead.
        prefetch: Batches, or parts of them, that each worker builds ahead.
        tokens_a_part: The most tokens that a worker sends at once; None: the whole batch.
        pinned: Whether batches are copied to page-locked memory.
    """
    batch = tokens * _BYTES_A_TOKEN
    if num_workers == 0:
        return HostMemory(shared_bytes=0, ram_bytes=(1 + _BUILDING + pinned) * batch)
    unit = min(tokens_a_part or tokens, tokens) * _BYTES_A_TOKEN
    shared = (num_workers * prefetch + _RECEIVED) * unit
    # A batch that is joined from parts is written to pinned memory directly; whole batches are all copied on
    # arrival.
    beside = batch if unit < batch else pinned * shared
    return HostMemory(shared_bytes=shared, ram_bytes=shared + num_workers * _BUILDING * unit + beside)


def host_room(processes: int = 1) -> HostMemory:
    """The memory for batches of each of this many processes on this machine: half of what is free now."""
    ram = min(limit.free_bytes for limit in host_limits())
    shared = ram
    if _SHARED_MEMORY.exists() and hasattr(os, "statvfs"):
        status = os.statvfs(_SHARED_MEMORY)
        shared = status.f_bavail * status.f_frsize
    share = _SHARE_OF_FREE / processes
    return HostMemory(shared_bytes=int(max(shared, 0) * share), ram_bytes=int(max(ram, 0) * share))


def tokens_a_part(
    tokens: int,
    longest_row: int,
    room: HostMemory,
    *,
    num_workers: int,
    prefetch: int = 2,
    pinned: bool = False,
) -> int:
    """The most tokens that a worker may send at once: a whole batch if that fits, and one row at least."""
    part = tokens
    while num_workers and part > longest_row:
        price = loader_memory(
            tokens, num_workers=num_workers, prefetch=prefetch, tokens_a_part=part, pinned=pinned
        )
        if price.shared_bytes <= room.shared_bytes and price.ram_bytes <= room.ram_bytes:
            break
        part = max(longest_row, part // 2)
    return part


def parse_room(size: int | str) -> HostMemory | None:
    """A limit of RAM and shared memory, such as "4GiB"; None for "auto"."""
    if size == "auto":
        return None
    count = parse_bytes(size)
    return HostMemory(shared_bytes=count, ram_bytes=count)

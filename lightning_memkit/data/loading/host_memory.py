"""What a loader's worker processes hold in host memory, and parts of batches where that would be too much.

A finished batch waits in shared memory (``/dev/shm`` on Linux), which is RAM too. With ``num_workers`` processes that
each work ``prefetch`` batches ahead, all of them may wait at once.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from lightning_memkit.memory.limits import host_limits
from lightning_memkit.memory.units import format_bytes, parse_bytes

_BYTES_A_TOKEN = 24  # input_ids, labels and position_ids, int64 each
_BUILDING = 2  # a batch under construction takes its places and sources beside itself
_RECEIVED = 2  # one that is used, and one that was taken out of shared memory ahead
_SHARE_OF_FREE = 0.5  # of what is free now: the model and the optimizer come later
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """The most that a loader holds at once.

    Attributes:
        shared_bytes: In shared memory: what waits, and what is being handed over.
        ram_bytes: Of RAM, with what is in shared memory.
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
    """Prices a loader of batches of so many tokens, padding included.

    Args:
        tokens: A batch.
        num_workers: Processes that build ahead.
        prefetch: Batches, or parts, that each works ahead.
        tokens_a_part: What a worker hands over at once; None: the whole batch.
        pinned: Batches are copied to page-locked memory.
    """
    batch = tokens * _BYTES_A_TOKEN
    if num_workers == 0:
        return HostMemory(shared_bytes=0, ram_bytes=(1 + _BUILDING + pinned) * batch)
    unit = min(tokens_a_part or tokens, tokens) * _BYTES_A_TOKEN
    shared = (num_workers * prefetch + _RECEIVED) * unit
    # A batch that is put together from parts is pinned as it is; whole batches are all copied when they come.
    beside = batch if unit < batch else pinned * shared
    return HostMemory(shared_bytes=shared, ram_bytes=shared + num_workers * _BUILDING * unit + beside)


def host_room(processes: int = 1) -> HostMemory:
    """What each of so many processes of this machine may use for batches: half of what is free now."""
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
    """What a worker may hand over at once: a whole batch, if that fits; a row at the least."""
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
    """A limit such as "4GiB", of RAM and of shared memory; None for "auto"."""
    if size == "auto":
        return None
    count = parse_bytes(size)
    return HostMemory(shared_bytes=count, ram_bytes=count)

"""What CUDA's caching allocator would reserve for the allocations of a step: a replay of its rules.

Source: `c10/cuda/CUDACachingAllocator.cpp` of torch 2.13. Sizes are rounded up to 512 bytes. Up to 1 MiB they
come from segments of 2 MiB; larger ones from segments of 20 MiB, or, from 10 MiB on, from a segment of their
own size rounded up to 2 MiB. The smallest free block that fits is used, and split unless the remainder would
be too small. A freed block is merged with free neighbours, and stays reserved for its own stream only.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_memkit.memory.meter import Allocation
from lightning_memkit.memory.units import format_bytes

_ROUND = 512
_SMALL_SIZE, _SMALL_SEGMENT = 1 << 20, 2 << 20
_LARGE_SEGMENT, _OWN_SEGMENT_FROM, _ROUND_OWN = 20 << 20, 10 << 20, 2 << 20


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """The most bytes allocated in blocks, and the most bytes reserved from the device."""

    allocated_bytes: int
    reserved_bytes: int


_Pool = tuple[bool, int]  # whether its blocks are small, and the stream


class _Block:
    __slots__ = ("free", "next", "previous", "segment", "size", "start")

    def __init__(self, segment: "_Segment", start: int, size: int) -> None:
        self.segment, self.start, self.size = segment, start, size
        self.previous: _Block | None = None
        self.next: _Block | None = None
        self.free = True


class _Segment:
    __slots__ = ("first", "number", "pool", "size")

    def __init__(self, number: int, size: int, pool: _Pool) -> None:
        self.number, self.size, self.pool = number, size, pool
        self.first = _Block(self, 0, size)


class CachingAllocator:
    """Allocates blocks of segments as CUDA's caching allocator does, without any memory.

    Args:
        capacity_bytes: what the device has for it; entirely free segments are released before it is exceeded.
        expandable: as with ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``: a pool is one segment that
            grows.
    """

    def __init__(self, capacity_bytes: int | None = None, *, expandable: bool = False) -> None:
        self.reserved_bytes = self.allocated_bytes = 0
        self.peak_reserved_bytes = self.peak_allocated_bytes = 0
        self._capacity, self._expandable = capacity_bytes, expandable
        self._free: defaultdict[_Pool, list[tuple[int, int, int, _Block]]] = defaultdict(list)
        self._growing: dict[_Pool, _Segment] = {}
        self._segments = 0

    def allocate(self, size_bytes: int, stream: int = 0) -> _Block:
        """Allocate a block for use in a stream.

        Raises:
            MemoryError: it does not fit into the capacity.
        """
        size = max(_ROUND, -(-size_bytes // _ROUND) * _ROUND)
        is_small = size <= _SMALL_SIZE
        pool = is_small, stream
        block = self._best_fit(size, pool) or self._reserved(size, pool)
        rest = block.size - size
        if rest >= (_ROUND if is_small or self._expandable else _SMALL_SIZE + 1):
            self._split(block, size)
        block.free = False
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: _Block) -> None:
        """Free a block; it stays reserved."""
        self.allocated_bytes -= block.size
        block.free = True
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.free:
                self._remove(neighbour)
                block = self._join(*sorted((block, neighbour), key=lambda one: one.start))
        self._insert(block)

    def _best_fit(self, size: int, pool: _Pool) -> _Block | None:
        free = self._free[pool]
        place = bisect_left(free, (size, -1, -1))
        return free.pop(place)[3] if place < len(free) else None

    def _reserved(self, size: int, pool: _Pool) -> _Block:
        if self._expandable:
            return self._grown(size, pool)
        if pool[0]:
            needed = _SMALL_SEGMENT
        else:
            needed = _LARGE_SEGMENT if size < _OWN_SEGMENT_FROM else -(-size // _ROUND_OWN) * _ROUND_OWN
        self._take(needed)
        self._segments += 1
        return _Segment(self._segments, needed, pool).first

    def _grown(self, size: int, pool: _Pool) -> _Block:
        """The end of the pool's one segment, after extending it."""
        page = _SMALL_SEGMENT if pool[0] else _LARGE_SEGMENT
        segment = self._growing.get(pool)
        if segment is None:
            self._segments += 1
            segment = self._growing[pool] = _Segment(self._segments, 0, pool)
            segment.first.free = False
        last = segment.first
        while last.next is not None:
            last = last.next
        missing = size - (last.size if last.free else 0)
        needed = -(-missing // page) * page
        self._take(needed)
        if last.free:
            self._remove(last)
            last.size += needed
        else:
            new = _Block(segment, segment.size, needed)
            last.next, new.previous, last = new, last, new
        segment.size += needed
        return last

    def _take(self, needed: int) -> None:
        if self._capacity is not None and self.reserved_bytes + needed > self._capacity:
            self._give_back()
            if self.reserved_bytes + needed > self._capacity:
                raise MemoryError(
                    f"{format_bytes(needed)} more than the {format_bytes(self.reserved_bytes)} that are reserved "
                    f"don't fit into {format_bytes(self._capacity)}."
                )
        self.reserved_bytes += needed
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _give_back(self) -> None:
        for pool in self._free.values():
            for entry in list(pool):
                block = entry[3]
                if block.size == block.segment.size:
                    pool.remove(entry)
                    self.reserved_bytes -= block.size

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.segment, block.start + size, block.size - size)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        self._insert(rest)

    def _join(self, left: _Block, right: _Block) -> _Block:
        left.size += right.size
        left.next = right.next
        if right.next is not None:
            right.next.previous = left
        left.free = True
        return left

    def _insert(self, block: _Block) -> None:
        insort(self._free[block.segment.pool], self._entry(block))

    def _remove(self, block: _Block) -> None:
        pool = self._free[block.segment.pool]
        del pool[bisect_left(pool, self._entry(block)[:3])]

    def _entry(self, block: _Block) -> tuple[int, int, int, _Block]:
        return (block.size, block.segment.number, block.start, block)


def replay(
    allocations: Iterable[Allocation], *, capacity_bytes: int | None = None, expandable: bool = False
) -> Reserved:
    """What the allocator would allocate and reserve at most for these tensor lifetimes.

    Args:
        allocations: births and deaths by one clock.
        capacity_bytes: see `CachingAllocator`.
        expandable: see `CachingAllocator`.

    Raises:
        MemoryError: they don't fit into the capacity.
    """
    events: list[tuple[int, int, Allocation]] = []
    for number, allocation in enumerate(allocations):
        events.append((allocation.born, number, allocation))
        if allocation.died is not None:
            events.append((allocation.died, ~number, allocation))
    allocator = CachingAllocator(capacity_bytes, expandable=expandable)
    blocks: dict[int, _Block] = {}
    for _, number, allocation in sorted(events, key=lambda event: event[0]):
        if number >= 0:
            blocks[number] = allocator.allocate(allocation.size_bytes, allocation.stream)
        else:
            allocator.free(blocks.pop(~number))
    return Reserved(
        allocated_bytes=allocator.peak_allocated_bytes, reserved_bytes=allocator.peak_reserved_bytes
    )

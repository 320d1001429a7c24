"""The replay against what the allocator's rules say by hand, and against rules that any allocator keeps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memkit.memory.meter import Allocation
from lightning_memkit.prediction.caching_allocator import CachingAllocator, replay

MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([1], 2 * MIB),
        ([512 * 1024] * 4, 2 * MIB),
        ([512 * 1024] * 4 + [1], 4 * MIB),
        ([MIB], 2 * MIB),
        ([MIB + 1], 20 * MIB),
        ([6 * MIB] * 3, 20 * MIB),
        ([6 * MIB] * 4, 40 * MIB),
        ([10 * MIB], 10 * MIB),
        ([10 * MIB + 1], 12 * MIB),
        ([33 * MIB], 34 * MIB),
    ],
)
def test_segments_are_as_large_as_the_rules_say(sizes, reserved):
    allocator = CachingAllocator()
    for size in sizes:
        allocator.allocate(size)
    assert allocator.reserved_bytes == reserved


def test_sizes_are_rounded_and_too_small_a_rest_is_not_split_off():
    allocator = CachingAllocator()
    assert allocator.allocate(1).size == 512
    assert allocator.allocate(513).size == 1024
    whole = CachingAllocator().allocate(
        19 * MIB
    )  # of 20 MiB: the rest of a MiB is no block of the large pool
    assert whole.size == 20 * MIB
    assert CachingAllocator().allocate(18 * MIB).size == 18 * MIB


def test_the_smallest_free_block_is_taken_and_neighbours_join():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (4, 2, 4, 2, 4)]
    allocator.free(blocks[2])
    allocator.free(blocks[1])  # 6 MiB in one
    allocator.free(blocks[4])
    assert allocator.allocate(2 * MIB).start == 4 * MIB
    assert allocator.allocate(6 * MIB).start == 12 * MIB  # the last, joined with what was never used: 8 MiB
    assert allocator.allocate(4 * MIB).start == 6 * MIB
    assert allocator.reserved_bytes == 20 * MIB


def test_free_segments_are_given_back_before_the_capacity_is_passed():
    allocator = CachingAllocator(capacity_bytes=64 * MIB)
    block = allocator.allocate(40 * MIB)
    allocator.free(block)
    allocator.allocate(50 * MIB)
    assert allocator.reserved_bytes == 50 * MIB
    with pytest.raises(MemoryError, match=r"20.* MiB more than the 50.* MiB"):
        allocator.allocate(2 * MIB)


def test_an_expandable_segment_has_no_gaps_between_sizes():
    lives = [
        Allocation(size * 11 * MIB, born=2 * size, phase="forward", died=2 * size + 1) for size in range(1, 6)
    ]
    assert replay(lives).reserved_bytes == sum(-(-size * 11 // 2) * 2 for size in range(1, 6)) * MIB
    assert replay(lives, expandable=True).reserved_bytes == 60 * MIB


@settings(max_examples=200, deadline=None)
@given(
    lives=st.lists(st.tuples(st.integers(1, 30 * MIB), st.integers(0, 60), st.integers(1, 60)), max_size=60),
    expandable=st.booleans(),
)
def test_what_is_handed_out_is_reserved_and_never_overlaps(lives, expandable):
    allocator = CachingAllocator(expandable=expandable)
    events = sorted(
        [(2 * born + 1, index, True) for index, (_, born, _) in enumerate(lives)]
        + [(2 * (born + lasts), index, False) for index, (_, born, lasts) in enumerate(lives)]
    )
    held = {}
    for _, index, is_birth in events:
        if is_birth:
            held[index] = allocator.allocate(lives[index][0])
            assert held[index].size >= lives[index][0]
        else:
            allocator.free(held.pop(index))
        spans = sorted((block.segment.number, block.start, block.size) for block in held.values())
        for (segment, start, size), (other, begin, _) in zip(spans, spans[1:], strict=False):
            assert segment != other or start + size <= begin
        assert allocator.allocated_bytes == sum(block.size for block in held.values())
        assert allocator.allocated_bytes <= allocator.reserved_bytes
        assert all(block.start + block.size <= block.segment.size for block in held.values())
    assert allocator.allocated_bytes == 0
    assert all(len(pool) <= allocator._segments for pool in allocator._free.values())  # all joined again

# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
"""Host buffers: used again, capped, and given up when their sizes no longer come."""

import pytest

from lightning_memkit.activations.offload_pool import HostPool
from tests.testing.fake_device import fake_device
from tests.testing.needs import NEEDS_COMPILER


def pool(limit=10**9):
    return HostPool(limit, pin_memory=False)


@pytest.mark.parametrize("size", [1, 4096, 4097, 1_000_000, 2**20, 2**20 + 1, 123_456_789])
def test_a_buffer_is_at_most_an_eighth_larger_than_asked_for(size):
    held = pool().take(size).bytes.nbytes
    assert size <= held <= size * 9 / 8 + 4096


def test_buffers_are_used_again():
    buffers = pool()
    first = buffers.take(10_000)
    buffers.give(first)
    assert buffers.take(10_001) is first
    assert buffers.used_bytes == buffers.held_bytes == first.bytes.nbytes


def test_past_the_cap_there_is_none():
    buffers = pool(limit=3 * 8192)
    taken = [buffers.take(8192) for _ in range(3)]
    assert buffers.take(1) is None
    buffers.give(taken.pop())
    assert buffers.take(8193) is None
    assert buffers.take(4096) is not None  # what is idle makes room
    assert buffers.held_bytes <= buffers.limit_bytes


def test_a_host_that_grows_is_asked_again_once_a_pass():
    rooms, asked = [0, 2 * 8192], []

    def room_now():
        asked.append(1)
        return rooms.pop(0)

    buffers = HostPool(2 * 8192, False, room_now)
    taken = [buffers.take(8192) for _ in range(2)]
    assert asked == []  # within the limit nobody is asked
    assert buffers.take(8192) is None
    assert buffers.take(8192) is None  # the answer of this pass stands
    buffers.begin_pass()
    taken += [buffers.take(8192) for _ in range(2)]
    assert None not in taken
    assert buffers.limit_bytes == buffers.held_bytes == 4 * 8192
    assert len(asked) == 2


def test_it_holds_no_more_than_was_in_use_at_once():
    buffers = pool()
    for size in (100_000, 90_000, 50_000, 100_000, 10_000):
        taken = [buffers.take(size) for _ in range(3)]
        for buffer in taken:
            buffers.give(buffer)
        assert buffers.held_bytes <= 3 * 106_496  # 100,000 rounded up


def test_what_a_larger_batch_needed_is_freed_after_some_passes():
    buffers = pool()
    for buffer in [buffers.take(10**5) for _ in range(3)]:
        buffers.give(buffer)
    held = buffers.held_bytes
    for index in range(20):
        buffers.begin_pass()
        assert (buffers.held_bytes == held) == (index < 15)
        buffers.give(buffers.take(10**5))
    assert buffers.held_bytes == held / 3


def test_close_frees_what_is_idle_and_the_rest_when_it_comes_back():
    buffers = pool()
    idle, used = buffers.take(5000), buffers.take(5000)
    buffers.give(idle)
    buffers.close()
    assert buffers.held_bytes == used.bytes.nbytes
    buffers.give(used)
    assert buffers.held_bytes == buffers.used_bytes == 0


def test_no_buffer_is_written_before_its_last_reader_is_done():
    class Event:
        waited = False

        def synchronize(self):
            self.waited = True

    buffers, event = pool(), Event()
    buffer = buffers.take(5000)
    buffer.free_after = event  # pyright: ignore[reportAttributeAccessIssue]
    buffers.give(buffer)
    assert buffers.take(5000).free_after is event  # the copy waits, on its stream
    buffers.give(buffer)
    buffers.close()
    assert event.waited


@NEEDS_COMPILER
@pytest.mark.parametrize("sizes", [(5000,), (70_000, 9000, 40_000), (2**20 + 1, 3 * 2**18, 2**16 - 1)])
def test_pinned_memory_stays_below_the_cap_and_goes_back_to_the_system(sizes):
    """Torch gives powers of two, whatever is asked for, and keeps what is freed."""
    with fake_device() as device:
        buffers = HostPool(int(2.7 * max(sizes)))
        for size in sizes * 2:
            taken = [buffer for buffer in (buffers.take(size) for _ in range(8)) if buffer is not None]
            assert taken
            assert buffers.held_bytes == device.pinned_bytes == device.pinned_reserved_bytes
            for buffer in taken:
                buffers.give(buffer)
            del taken, buffer
        assert device.pinned_reserved_peak_bytes <= buffers.limit_bytes
        buffers.close()
        assert buffers.held_bytes == device.pinned_reserved_bytes == 0

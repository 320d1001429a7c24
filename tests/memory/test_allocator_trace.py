"""Bytes of the allocator, counted by hand, also of what a kernel takes for itself."""

import torch

from lightning_memkit.memory.allocator_trace import AllocatorTrace


def test_what_is_made_freed_and_marked_is_counted_to_the_byte() -> None:
    with AllocatorTrace() as trace:
        kept = torch.ones(100)
        passing = torch.ones(5000)
        trace.mark()
        del passing
        trace.mark()
        later = torch.ones(10)
    assert trace.marked_bytes == [20_400, 400]
    assert trace.live_bytes == kept.nbytes + later.nbytes
    assert trace.peak_bytes == 20_400
    assert trace.peaks_between == [20_400, 20_400, 440]


def test_another_devices_bytes_are_not_counted() -> None:
    with AllocatorTrace("cuda") as trace:
        torch.ones(1000)
    assert trace.peak_bytes == 0


def test_it_is_not_available_within_another_profiler() -> None:
    assert AllocatorTrace.available()
    with AllocatorTrace():
        assert not AllocatorTrace.available()
    assert AllocatorTrace.available()

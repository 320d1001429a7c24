"""Trace what an allocator hands out and takes back, including kernels that bypass the dispatcher."""

from typing import Any

import torch

_MARK = "lightning_memkit: mark"


class AllocatorTrace:
    """Traces a device's allocator with torch's profiler while entered; costs microseconds an allocation.

    All bytes are relative to entry: `peak_bytes` is the peak, `peaks_between` those of the sections that marks
    separate, `marked_bytes` are the live bytes at each `mark()`, `live_bytes` those at the end. Memory from
    before entry that is freed inside is not counted on CPU, whose allocator doesn't know its size. Unlike
    `AllocatorMeter`, it leaves the allocator's own statistics unchanged. torch runs one profiler at a time:
    check `available` first. Not yet verified on a GPU.

    Args:
        device: the device whose allocations are counted.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._profile: Any = None
        self.live_bytes = 0
        self.peak_bytes = 0
        self.marked_bytes: list[int] = []
        self.peaks_between: list[int] = []

    @staticmethod
    def available() -> bool:
        """Whether no other profiler is running."""
        return not torch.autograd._profiler_enabled()

    def mark(self) -> None:
        """Record the bytes that are alive now, and begin another section."""
        with torch.profiler.record_function(_MARK):
            pass

    def __enter__(self) -> "AllocatorTrace":
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            profile_memory=True,
            acc_events=True,  # torch 2.10 warns without it, though there is only one cycle
        )
        self._profile.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        profile, self._profile = self._profile, None
        profile.__exit__(*exception)
        events = profile.profiler.kineto_results.events()
        self.peaks_between.append(self.live_bytes)
        for event in sorted(events, key=lambda event: event.start_ns()):
            if event.name() == _MARK:
                self.marked_bytes.append(self.live_bytes)
                self.peaks_between.append(self.live_bytes)
            elif event.name() == "[memory]" and self._is_ours(event):
                self.live_bytes += event.nbytes()
                self.peaks_between[-1] = max(self.peaks_between[-1], self.live_bytes)
        self.peak_bytes = max(self.peaks_between)

    def _is_ours(self, event: Any) -> bool:
        if event.device_type().name.lower() != self._device.type:
            return False
        return self._device.index in (None, event.device_index())

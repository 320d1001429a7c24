"""What an allocator hands out and takes back during a piece of work, also where kernels go past the dispatcher."""

from typing import Any

import torch

_MARK = "lightning_memkit: mark"


class AllocatorTrace:
    """Bytes of a device's allocator while entered, from torch's profiler; costs microseconds an allocation.

    `peak_bytes` is the most above what was alive at entry, `marked_bytes` what was alive of it at each `mark()`,
    `live_bytes` what is alive of it at the end. What was there at entry and is freed within does not count on CPU,
    whose allocator doesn't know its size. The allocator's own statistics stay as they are, unlike with
    `AllocatorMeter`. torch runs one profiler at a time: ask `available`. Not yet verified on a GPU.

    Args:
        device: whose allocations are counted.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._profile: Any = None
        self.live_bytes = 0
        self.peak_bytes = 0
        self.marked_bytes: list[int] = []

    @staticmethod
    def available() -> bool:
        """Whether no other profiler runs."""
        return not torch.autograd._profiler_enabled()

    def mark(self) -> None:
        """Note what is alive now."""
        with torch.profiler.record_function(_MARK):
            pass

    def __enter__(self) -> "AllocatorTrace":
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            profile_memory=True,
            acc_events=True,  # there is one cycle; torch 2.10 warns of others without it
        )
        self._profile.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        profile, self._profile = self._profile, None
        profile.__exit__(*exception)
        events = profile.profiler.kineto_results.events()
        for event in sorted(events, key=lambda event: event.start_ns()):
            if event.name() == _MARK:
                self.marked_bytes.append(self.live_bytes)
            elif event.name() == "[memory]" and self._is_ours(event):
                self.live_bytes += event.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _is_ours(self, event: Any) -> bool:
        if event.device_type().name.lower() != self._device.type:
            return False
        return self._device.index in (None, event.device_index())

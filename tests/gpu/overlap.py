"""Do copies run beside compute? As the profiler saw the card's streams."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def copies_beside_compute(work: Callable[[], Any], direction: str) -> tuple[int, int]:
    """How many copies in a direction there were, and how many of them ran while another stream computed.

    Args:
        work: what is profiled; the device must be idle before.
        direction: `"DtoH"` or `"HtoD"`; copies to and from pinned memory count alone.
    """
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        work()
        torch.cuda.synchronize()
    events: list[Any] = [event for event in seen.events() or () if event.device_type == DeviceType.CUDA]
    copies = [e for e in events if f"Memcpy {direction}" in e.name and "Pinned" in e.name]
    kernels = [event for event in events if not event.name.startswith(("Memcpy", "Memset"))]

    def is_beside(copy: Any) -> bool:
        span = copy.time_range
        return any(
            kernel.device_resource_id != copy.device_resource_id
            and kernel.time_range.start < span.end
            and span.start < kernel.time_range.end
            for kernel in kernels
        )

    return len(copies), sum(map(is_beside, copies))

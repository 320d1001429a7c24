"""Pinned host memory as torch's allocator of it gives it: by powers of two, and kept when it is freed."""

import torch


def pinned_size(size_bytes: int) -> int:
    """What so many bytes take of the host: the next power of two.

    Source: ATen/core/CachingHostAllocator.h. Where `pinned_max_round_threshold_mb` is set, larger ones take less.
    """
    return 1 << (size_bytes - 1).bit_length() if size_bytes > 0 else 0


def return_pinned() -> None:
    """Return to the system what torch keeps of pinned memory that nobody uses; waits for the device.

    An older torch has a way for CUDA alone, and none in its builds without CUDA.
    """
    empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(
        torch._C, "_host_emptyCache", None
    )
    if empty is not None:
        empty()

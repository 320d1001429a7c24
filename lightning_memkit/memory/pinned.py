"""Sizes of pinned host memory: torch's allocator rounds up to powers of two and caches freed memory."""

import torch


def pinned_size(size_bytes: int) -> int:
    """Host bytes of a pinned allocation: the next power of two (ATen/core/CachingHostAllocator.h)."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes > 0 else 0


def return_pinned() -> None:
    """Return torch's cached, unused pinned memory to the system; may wait for the device.

    Older versions of torch can do so on CUDA only.
    """
    if not torch.accelerator.is_available():
        return
    empty = getattr(torch.accelerator, "empty_host_cache", None)
    if empty is None and torch.cuda.is_initialized():
        empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()

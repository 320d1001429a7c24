"""Pinned host memory as torch's allocator of it gives it: by powers of two, and kept when it is freed."""

import torch


def pinned_size(size_bytes: int) -> int:
    """What so many bytes take of the host: the next power of two (torch's ATen/core/CachingHostAllocator.h)."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes > 0 else 0


def return_pinned() -> None:
    """Return to the system what torch keeps of pinned memory that nobody uses; may wait for the device.

    An older torch can do so on CUDA alone.
    """
    if not torch.accelerator.is_available():
        return
    empty = getattr(torch.accelerator, "empty_host_cache", None)
    if empty is None and torch.cuda.is_initialized():
        empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()

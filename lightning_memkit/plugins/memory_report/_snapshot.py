"""torch's own snapshot of CUDA's allocator, written beside a report. Last verified on GPU: 2026-11-27, H200."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_ENTRIES = 200_000  # allocations and releases with their stacks: a step has thousands


def record(device: torch.device) -> Callable[[], None]:
    """Record each CUDA allocation with its stack, at some microseconds each; returns the undo.

    Does nothing on other devices, or if the user is already recording.
    """
    if device.type != "cuda" or _is_recording():
        return lambda: None
    memory: Any = torch.cuda.memory
    try:
        # Python only: with C++ stacks, symbolizing so many entries takes minutes.
        memory._record_memory_history(max_entries=_ENTRIES, stacks="python")
    except (RuntimeError, AttributeError, TypeError) as error:  # private: a later torch may change it
        warnings.warn(f"MemoryReport writes no snapshot of CUDA's allocator: {error}", stacklevel=2)
        return lambda: None
    return lambda: memory._record_memory_history(enabled=None)


def dump(device: torch.device, path: Path) -> bool:
    """Write a snapshot of CUDA's allocator for pytorch.org/memory_viz; returns whether it was written."""
    if device.type != "cuda":
        return False
    memory: Any = torch.cuda.memory
    try:
        memory._dump_snapshot(str(path))
    except (RuntimeError, AttributeError, TypeError, OSError) as error:
        warnings.warn(f"MemoryReport writes no snapshot of CUDA's allocator: {error}", stacklevel=2)
        return False
    return True


def _is_recording() -> bool:
    asked = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return bool(asked is not None and asked())

"""By how much a call raises the peak of this process, on Linux."""

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def peak_growth(call: Callable[[], object]) -> int:
    """Bytes of resident memory at the peak of the call beyond those before it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = _status("VmRSS")
    kept = call()
    growth = _status("VmHWM") - before
    del kept
    return growth

"""Files whose pages are written back while more is written, so that the final fsync waits for less."""

import ctypes
import io
import sys
from functools import cache
from pathlib import Path
from typing import Any

_WINDOW_BYTES = 8 * 1024**2  # between two requests; takes a disk some milliseconds
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: start the write-back without waiting


class StreamedFile(io.FileIO):
    """A file that is written sequentially; on other systems than Linux a plain one.

    The disk works while checksums are computed and pages are copied. Durability is guaranteed only by
    `os.fsync`.
    """

    def __init__(self, path: Path, mode: str) -> None:
        super().__init__(path, mode)
        self._written = self._asked = 0

    def write(self, data: Any, /) -> int:
        """Write some of it, and request the write-back of what was written before."""
        written = super().write(data)
        self._written += written
        if self._written - self._asked >= _WINDOW_BYTES:
            _begin(self.fileno(), self._asked, self._written - self._asked)
            self._asked = self._written
        return written


def _begin(descriptor: int, start: int, count: int) -> None:
    call = _call()
    if call is not None:
        call(descriptor, start, count, _WRITE)  # if it is unsupported, fsync does all the work


@cache
def _call() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call

"""Files whose pages go to the disk while the next ones are written: the fsync at the end then waits for less."""

import ctypes
import io
import sys
from functools import cache
from pathlib import Path
from typing import Any

_WINDOW_BYTES = 8 * 1024**2  # between two requests; a disk is busy with it for milliseconds
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin, and wait for nothing


class StreamedFile(io.FileIO):
    """A file that is written from its start to its end; elsewhere than on Linux a plain one.

    The disk works while checksums are made and pages are copied. What is promised about the disk, `os.fsync` promises.
    """

    def __init__(self, path: Path, mode: str) -> None:
        super().__init__(path, mode)
        self._written = self._asked = 0

    def write(self, data: Any, /) -> int:
        """Write some of it, and ask for what is behind it to be brought to disk."""
        written = super().write(data)
        self._written += written
        if self._written - self._asked >= _WINDOW_BYTES:
            _begin(self.fileno(), self._asked, self._written - self._asked)
            self._asked = self._written
        return written


def _begin(descriptor: int, start: int, count: int) -> None:
    call = _call()
    if call is not None:
        call(descriptor, start, count, _WRITE)  # where a file system can't, fsync does all of it


@cache
def _call() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call

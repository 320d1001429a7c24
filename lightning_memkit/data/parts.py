"""Files under way: each is locked by the process that writes it, so that what a killed one has left is known by that.

The kernel takes a lock back when its process ends, however it ends. Processes that were forked meanwhile (they
tokenise) must not keep it: they let go of it as they start.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl: Any = None

_STALE_SECONDS = 24 * 3600  # where no lock tells
_held: set[int] = set()  # descriptors of locks


class Lock:
    """A file's lock, until `close`; of a file system without locks none."""

    def __init__(self, file: IO[Any]) -> None:
        self._file = file
        _held.add(file.fileno())
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Lets go of it."""
        _held.discard(self._file.fileno())
        self._file.close()


def new_part(path: Path) -> tuple[Path, Lock]:
    """An empty file beside a place, locked: what is written there until it is whole."""
    while True:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".part")
        lock = Lock(os.fdopen(handle, "rb"))
        if Path(name).exists():  # else somebody has taken it for left behind, before it was locked
            return Path(name), lock
        lock.close()


def drop_stale_parts(path: Path) -> None:
    """Remove what processes that were killed while they wrote a file have left; what is being written stays."""
    for part in path.parent.glob(f"{path.stem}*.part"):
        with contextlib.suppress(OSError):
            is_locked_by_name = part.name.startswith(f"{path.stem}.")  # earlier versions locked nothing
            is_old = time.time() - part.stat().st_mtime > _STALE_SECONDS
            if is_old or (is_locked_by_name and _is_left(part)):
                part.unlink()
    for beside in path.parent.glob(f"{path.stem}*.part.learned"):
        with contextlib.suppress(OSError):
            if not beside.with_suffix("").exists():
                beside.unlink()


@contextlib.contextmanager
def not_in_forks(file: IO[Any]) -> Iterator[None]:
    """Forks that start within it close this file, whose lock they would else hold as long as they live."""
    _held.add(file.fileno())
    try:
        yield
    finally:
        _held.discard(file.fileno())


def _is_left(part: Path) -> bool:
    if fcntl is None:
        return False
    with part.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def _let_go() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)

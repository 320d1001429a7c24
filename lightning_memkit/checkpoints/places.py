"""Where checkpoints go: paths, URLs, and files that were announced but are not written yet."""

import os
import re
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_memkit.checkpoints import atomic
from lightning_memkit.checkpoints.errors import CheckpointError

_SCHEME = re.compile(
    r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)(.*)", re.DOTALL
)  # at least two letters, since C:/ is a drive


def place_of(path: str | os.PathLike[str], **options: Any) -> Path | tuple[Any, str]:
    """A path (also for `file://` and `local://`), or for other URLs a file system and a name in it.

    Args:
        path: what the user gave; possibly a URL as a `Path`, which has dropped one slash.
        options: of the URL's file system.

    Raises:
        CheckpointError: the URL's scheme is unknown.
    """
    text = os.fspath(path)
    shortened = _SCHEME.match(text)
    if shortened and shortened[1] in fsspec.available_protocols():
        slashes = ":///" if shortened[1] in ("file", "local") else "://"
        text = f"{shortened[1]}{slashes}{shortened[2]}"
    if "://" not in text:
        return Path(text)
    try:
        file_system, name = url_to_fs(text, **options)
    except (ValueError, ImportError) as error:
        raise CheckpointError(
            f"{text} is no place for a checkpoint ({error}): it has to be a path, or a URL that fsspec knows. Install "
            "the package of its file system (s3fs for s3://, gcsfs for gs://), or give a path."
        ) from error
    return Path(name) if isinstance(file_system, LocalFileSystem) else (file_system, name)


def folder_of_ranks(path: str | os.PathLike[str]) -> Path:
    """The folder that ranks write and read together.

    Raises:
        CheckpointError: it is a URL, of which torch would make a local folder of that name.
    """
    place = place_of(path)
    if not isinstance(place, Path):
        raise CheckpointError(
            f"{path} is a URL, and a sharded checkpoint is a folder that all ranks see: they write and read it "
            "together. Mount it and give its path, or write one file there: "
            "FSDP2Strategy(save_distributed_checkpoint=False)."
        )
    return place


def remove_place(place: Path | tuple[Any, str]) -> None:
    """Remove the file or folder at a place, if it exists."""
    if isinstance(place, Path):
        atomic.remove(place)
    elif place[0].exists(place[1]):
        place[0].rm(place[1], recursive=True)


class _AnnouncedSave:
    """Files that a thread will write, which already seem to exist.

    ModelCheckpoint asks fsspec's local file system whether a name is taken. Without this, two callbacks would
    choose the same name, and one would remove what the other keeps.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writes: dict[str, list[Future[None]]] = {}
        self._asked: Any = None  # the file system that is patched

    def announce(self, path: Path, write: Future[None]) -> None:
        """Make a file seem to exist until its write has ended; then it does."""
        name = os.path.abspath(path)
        with self._lock:
            self._writes.setdefault(name, []).append(write)
            if self._asked is None:
                self._asked = LocalFileSystem()  # fsspec's cached instance, shared within a thread
                plain = self._asked.exists
                self._asked.exists = lambda path, **options: self._knows(path) or plain(path, **options)
        write.add_done_callback(lambda write: self._forget(name, write))

    def wait(self, path: Path) -> None:
        """Return when all announced writes of a file have ended."""
        with self._lock:
            writes = list(self._writes.get(os.path.abspath(path), ()))
        for write in writes:
            write.result()

    def _knows(self, path: Any) -> bool:
        return os.path.abspath(LocalFileSystem._strip_protocol(os.fspath(path))) in self._writes

    def _forget(self, name: str, write: Future[None]) -> None:
        with self._lock:
            self._writes[name].remove(write)
            if not self._writes[name]:
                del self._writes[name]
            if not self._writes and self._asked is not None:
                del self._asked.exists  # the instance's attribute: restores the class's method
                self._asked = None


announced = _AnnouncedSave()

"""Checkpoints that stream to disk, replace the last one only when they are whole, and load without running code."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO

from lightning_memkit.checkpoints import atomic, files, streamed
from lightning_memkit.checkpoints.background import BackgroundWriter
from lightning_memkit.checkpoints.documents import Document, encode

_PIECE_BYTES = streamed.PIECE_BYTES


class StreamingCheckpointIO(CheckpointIO):
    """Checkpoints as one safetensors file, written tensor by tensor: no copy in host memory, never half a file.

    A file appears under its name when all of it is on disk, so that a kill at any moment leaves the last good one.
    Loading maps the file into memory. A checkpoint holds tensors and primitives only, and nothing in one is ever
    run: those that stock Lightning wrote are read with `weights_only=True`, whatever the caller says, and URLs, too.
    Works with every strategy that uses a CheckpointIO. The price: `load_from_checkpoint` wants a file that
    `memkit consolidate` has written, and objects among the hyperparameters are refused when the checkpoint is saved.
    Not yet verified on a GPU.

    Args:
        asynchronous: copy the state to host memory (one whole copy of it; where ranks write a folder, each its own
            shards) and write in a thread. Order is kept; the error of a write surfaces at the next save and at the
            end of the fit, which waits for the last one.

    Raises:
        CheckpointError: a state can't be saved, or a file can't be loaded.
    """

    def __init__(self, *, asynchronous: bool = False) -> None:
        self._asynchronous = asynchronous
        self._writer = BackgroundWriter()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(asynchronous={self._asynchronous})"

    @property
    def asynchronous(self) -> bool:
        """Whether a thread writes."""
        return self._asynchronous

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write a checkpoint; one of this name is replaced when the new one is whole.

        Args:
            checkpoint: the state.
            path: a path, or a URL that fsspec can write to.
            storage_options: of the URL's file system.
        """
        document = encode(checkpoint)
        if not self._asynchronous:
            _write(document, path, storage_options)
            return
        self._writer.wait()  # one snapshot at a time, and the error of the one before
        document = files.snapshot(document)
        self._writer.submit(lambda: _write(document, path, storage_options))

    def write_later(self, job: Callable[[], object]) -> None:
        """Have the thread run a job after those before it; for what a strategy writes by itself."""
        self._writer.submit(job)

    def wait(self) -> None:
        """Return when all is written, and raise the error of what could not be."""
        self._writer.wait()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint of this class or of stock Lightning.

        Args:
            path: a path, or a URL that fsspec can read; what it names is downloaded into a temporary file.
            map_location: where tensors shall be.
            weights_only: True in any case.
        """
        self._writer.wait()
        remote = _remote(path)
        if remote is None:
            return files.load(_local(path), map_location)
        file_system, name = remote
        with tempfile.TemporaryDirectory(prefix="memkit-", ignore_cleanup_errors=True) as folder:
            copy = Path(folder, "checkpoint")
            with file_system.open(name, "rb") as source, copy.open("wb") as target:
                shutil.copyfileobj(source, target, _PIECE_BYTES)
            return files.load(copy, map_location)  # the map outlives the file's name

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, a file or a folder; after the writes before it, and not if one of them failed."""
        if self._asynchronous:
            self._writer.submit(lambda: _remove(path))
        else:
            _remove(path)

    def teardown(self) -> None:
        """Wait for what is being written, and raise its error."""
        self._writer.close()


def _write(document: Document, path: str | os.PathLike[str], storage_options: Any) -> None:
    remote = _remote(path, **(storage_options or {}))
    if remote is None:
        files.write_document(document, _local(path))
        return
    file_system, name = remote
    # An object store shows an object when it is complete; elsewhere the transaction renames.
    with file_system.transaction, file_system.open(name, "wb") as file:
        streamed.write(document, file)


def _remove(path: str | os.PathLike[str]) -> None:
    remote = _remote(path)
    if remote is None:
        atomic.remove(_local(path))
    elif remote[0].exists(remote[1]):
        remote[0].rm(remote[1], recursive=True)


def _remote(path: str | os.PathLike[str], **options: Any) -> tuple[Any, str] | None:
    """The file system of a URL and the name in it; None for a path."""
    if "://" not in str(path):
        return None
    file_system, name = url_to_fs(str(path), **options)
    return None if isinstance(file_system, LocalFileSystem) else (file_system, name)


def _local(path: str | os.PathLike[str]) -> Path:
    return Path(str(path).removeprefix("file://"))

"""Checkpoints that stream to disk, replace the previous one atomically, and load without running code."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from lightning_memkit.checkpoints import files, streamed
from lightning_memkit.checkpoints.background import BackgroundWriter
from lightning_memkit.checkpoints.documents import Document, encode
from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.checkpoints.places import announced, place_of, remove_place

_PIECE_BYTES = streamed.PIECE_BYTES


class StreamingCheckpointIO(CheckpointIO):
    """Checkpoints as one safetensors file, written tensor by tensor: no copy in host memory, never half a file.

    A file gets its name only when all of it is on disk, so a kill at any moment leaves the previous one
    intact. Loading maps the file into memory. A checkpoint holds only tensors and primitives, and nothing in
    one is ever executed: checkpoints of stock Lightning, also from URLs, are read with `weights_only=True`,
    whatever the caller says. Works with every strategy that uses a CheckpointIO. The price:
    `load_from_checkpoint` needs a file that `memkit consolidate` has written, and objects among the
    hyperparameters are refused when a checkpoint is saved. Not yet verified on a GPU.

    Args:
        asynchronous: copy the state to host memory (a whole copy; if ranks write a folder, each copies its
            own shards) and write in a thread. Order is kept; an error of a write is raised at the next save
            and at the end of the fit, which waits for the last one.

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
        """Whether a thread writes checkpoints."""
        return self._asynchronous

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write a checkpoint; an older one of this name is replaced once the new one is complete.

        Args:
            checkpoint: the state.
            path: a path, or a URL that fsspec can write to.
            storage_options: of the URL's file system.
        """
        place = place_of(path, **(storage_options or {}))
        document = encode(checkpoint)
        if not self._asynchronous:
            _write(document, place)
            return
        self._writer.wait()  # at most one snapshot at a time; raises the previous write's error
        document = files.snapshot(document)
        if not isinstance(place, Path):
            self._writer.submit(lambda: _write(document, place))
            return
        place.parent.mkdir(parents=True, exist_ok=True)  # ModelCheckpoint links to it at once
        announced.announce(place, self._writer.submit(lambda: _write(document, place)))

    def write_later(self, job: Callable[[], object], path: Path | None = None) -> None:
        """Run a job in the thread, after earlier ones; for what a strategy itself writes to `path`."""
        ended = self._writer.submit(job)
        if path is not None:
            announced.announce(path, ended)

    def wait(self) -> None:
        """Return when everything is written, and raise the error of a write that failed."""
        self._writer.wait()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint of this class or of stock Lightning.

        Args:
            path: a path, or a URL that fsspec can read; a URL is downloaded into a temporary file.
            map_location: where to put tensors.
            weights_only: ignored; always True.
        """
        self._writer.wait()
        place = place_of(path)
        if isinstance(place, Path):
            announced.wait(place)  # another Trainer's thread may be about to write it
            state = files.load(place, map_location)
        else:
            state = _load_copy(place, str(path), map_location)
        if not isinstance(state, dict):
            raise CheckpointError(
                f"{path} holds a {type(state).__name__}, not a checkpoint; give a file that Trainer.save_checkpoint "
                "wrote."
            )
        return state

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint file or folder; asynchronously after earlier writes, unless one failed."""
        place = place_of(path)
        if self._asynchronous:
            self._writer.submit(lambda: remove_place(place))
        else:
            remove_place(place)

    def teardown(self) -> None:
        """Wait for pending writes, and raise their error."""
        self._writer.close()


def _write(document: Document, place: Path | tuple[Any, str]) -> None:
    if isinstance(place, Path):
        files.write_document(document, place)
        return
    file_system, name = place
    # An object store shows only complete objects; on other file systems the transaction renames.
    with file_system.transaction, file_system.open(name, "wb") as file:
        streamed.write(document, file)


def _load_copy(place: tuple[Any, str], url: str, map_location: Any) -> Any:
    file_system, name = place
    with tempfile.TemporaryDirectory(prefix="memkit-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder, "checkpoint")
        with file_system.open(name, "rb") as source, copy.open("wb") as target:
            shutil.copyfileobj(source, target, _PIECE_BYTES)
        try:
            return files.load(copy, map_location)  # the memory map outlives the deleted file
        except CheckpointError as error:  # name the URL instead of the temporary copy
            raise CheckpointError(str(error).replace(str(copy), url)) from error

"""Checksums of a torch.distributed.checkpoint folder: each rank computes its files', rank 0 writes all.

They are in a file of their own, `.checksums`, which other readers ignore. A rank that loads verifies only the
4 MiB chunks that it is about to read.
"""

import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.futures import Future

from lightning_memkit.checkpoints.atomic import CONTENTS
from lightning_memkit.checkpoints.checksums import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    REMEDY,
    Checksums,
    HashedWriter,
    check,
    digest,
)
from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.checkpoints.writeback import StreamedFile

FILE = ".checksums"
_VERSION = 1
_MARK = "+xxh3"  # suffix of the folder's id in its table of contents, which says that checksums must exist


@contextmanager
def hashed_file(path: Path, mode: str, found: dict[str, Checksums]) -> Iterator[Any]:
    """A file to write sequentially; on closing, its checksums are stored in ``found`` under its name."""
    raw = _Hashed(path, mode)
    with io.BufferedWriter(raw) as file:
        yield file
    found[path.name] = raw.checksums()


class _Hashed(StreamedFile):
    def __init__(self, path: Path, mode: str) -> None:
        super().__init__(path, mode)
        self._writer = HashedWriter(SimpleNamespace(write=super().write))

    def write(self, data: Any, /) -> int:
        """Write all of it."""
        return self._writer.write(data)

    def seek(self, *_: Any) -> int:
        """Refuse: overwriting would invalidate the hashes."""
        raise io.UnsupportedOperation("A file that is hashed while it is written has one direction.")

    def checksums(self) -> Checksums:
        """The checksums of all that was written."""
        return self._writer.checksums()


class _HashedFiles(FileSystem):
    """torch's file system interface, with hashing."""

    def __init__(self) -> None:
        self.found: dict[str, Checksums] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file of the folder."""
        if "w" not in mode:
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with hashed_file(Path(path), mode, self.found) as stream:
            yield stream


class HashingWriter(dcp.FileSystemWriter):
    """torch's writer of a folder, which computes checksums as it writes.

    They travel to rank 0 with the results that torch sends there, without another collective.
    """

    def __init__(self, folder: Path, copy_ahead: int) -> None:
        super().__init__(folder, per_thread_copy_ahead=copy_ahead)
        self.fs = self._files = _HashedFiles()

    @property
    def found(self) -> dict[str, Checksums]:
        """On rank 0 after writing: the checksums of all ranks' files and of the table of contents."""
        return self._files.found

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        """Write this rank's file."""
        written = super().write_data(plan, planner)
        names: set[str] = set()
        for result in written.value():
            place = result.storage_data
            if place.relative_path not in names:
                names.add(place.relative_path)
                place.checksums = self.found[place.relative_path]
        return written

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write the table of contents."""
        for result in (result for of_rank in results for result in of_rank):
            place = result.storage_data
            if hasattr(place, "checksums"):
                self.found[place.relative_path] = place.checksums
                del place.checksums
        super().finish(metadata, results)
        self.found[CONTENTS] = self.found.pop(f"{CONTENTS}.tmp")

    def storage_meta(self) -> StorageMeta | None:
        """What the table of contents says about the folder."""
        meta = super().storage_meta()
        return meta and replace(meta, save_id=f"{meta.save_id}{_MARK}")


class CheckedReader(dcp.FileSystemReader):
    """torch's reader of a folder, which first verifies the chunks that it is about to read."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items."""
        check_items(Path(self.path), self.storage_data, plan.items)
        return super().read_data(plan, planner)


def check_items(folder: Path, places: Mapping[Any, Any], items: Iterable[ReadItem]) -> None:
    """Verify the chunks that contain some items, if the folder has checksums.

    Args:
        folder: a folder of torch.distributed.checkpoint.
        places: where each stored item is, from the table of contents.
        items: the items that are about to be read.

    Raises:
        CheckpointError: a file, or the list of checksums, is damaged.
    """
    found = read_checksums(folder)
    wanted: dict[str, set[int]] = {}
    for item in items if found else ():
        place = places[item.storage_index]
        sums = _of(folder, place.relative_path, found)
        chunks = sums.chunks_of(place.offset, place.offset + place.length)
        wanted.setdefault(place.relative_path, set()).update(chunks)
    for name, chunks in wanted.items():
        check(folder / name, _of(folder, name, found), chunks)


def must_have_checksums(metadata: Metadata) -> bool:
    """Whether a folder was written with checksums, according to its table of contents."""
    return str(getattr(metadata.storage_meta, "save_id", "")).endswith(_MARK)


def check_file(folder: Path, name: str) -> bool:
    """Verify a file by the folder's checksums; False if the folder has none.

    Raises:
        CheckpointError: the file, or the list of checksums, is damaged.
    """
    found = read_checksums(folder)
    if found is not None:
        check(folder / name, _of(folder, name, found))
    return found is not None


def write_checksums(folder: Path, found: dict[str, Checksums]) -> None:
    """Write the checksums of all files."""
    files = {
        name: [sums.size, b"".join(part.to_bytes(DIGEST_BYTES, "big") for part in sums.digests).hex()]
        for name, sums in sorted(found.items())
    }
    text = json.dumps({"version": _VERSION, "chunk_bytes": CHUNK_BYTES, "files": files}, indent=0).encode()
    with (folder / FILE).open("xb") as file:
        file.write(text + b"\n" + digest(text).hex().encode())
        file.flush()
        os.fsync(file.fileno())


def read_checksums(folder: Path) -> dict[str, Checksums] | None:
    """The checksums of a folder's files by name; None if it has no list of them.

    Raises:
        CheckpointError: the list is damaged.
    """
    path = folder / FILE
    try:
        text, _, own = path.read_bytes().rpartition(b"\n")
    except FileNotFoundError:
        return None
    if own != digest(text).hex().encode():
        raise CheckpointError(
            f"{path} is damaged and can't be loaded: it is not the list that was written. {REMEDY}"
        )
    try:
        content = json.loads(text)
        if content["version"] != _VERSION or content["chunk_bytes"] != CHUNK_BYTES:
            raise ValueError(f"its version is {content['version']}; install the memkit that wrote it")
        return {name: _from_hex(*entry) for name, entry in content["files"].items()}
    except Exception as error:  # any kind: the file was written by something else
        raise CheckpointError(f"{path} is no list of checksums ({error!r}). {REMEDY}") from error


def _from_hex(size: int, digests: str) -> Checksums:
    raw = bytes.fromhex(digests)
    parts = (raw[start : start + DIGEST_BYTES] for start in range(0, len(raw), DIGEST_BYTES))
    return Checksums(
        size=size, first=min(size, CHUNK_BYTES), digests=tuple(int.from_bytes(part, "big") for part in parts)
    )


def _of(folder: Path, name: str, found: dict[str, Checksums] | None) -> Checksums:
    if found is None or name not in found:
        raise CheckpointError(
            f"{folder / FILE} has no checksums of {name}: it is of another folder. {REMEDY}"
        )
    return found[name]

"""Token stores in one Arrow file that processes map instead of reading: written whole, verified, never copied.

The file is an Arrow stream of one record batch, so that all lists of a column are contiguous: ``input_ids``
are the documents, and ``learned``, if present, marks the tokens that are labels.
``datasets.Dataset.from_file`` can read it, too. The schema's metadata contains the size of the vocabulary and
the CRC-32 of every array.
"""

import contextlib
import json
import mmap
import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from lightning_memkit.data.sources.checksums import checksum_of, crc_of
from lightning_memkit.data.sources.store import TokenStore, learned_of, offsets_of, token_type

FORMAT = 2  # increase it when the file's layout changes
_METADATA = b"lightning_memkit"
_STALE_SECONDS = 24 * 3600
_BLOCK = 2**22
# The kernel maps up to 16 pages around each position that is read; they are released once they may add up to
# `_HELD`.
_AROUND, _HELD = 16 * 4096, 2**26

Place = tuple[str, int, int]  # of an array in the file: its dtype, its number of values, its first byte


@dataclass(frozen=True, kw_only=True)
class MappedStore(TokenStore):
    """A store whose arrays are in a file: no memory of its own, one copy for all processes of a machine.

    Pickling it (for a worker process that is not forked) passes the path and the arrays' positions: the
    worker maps them without Arrow, which would cost it 25 MiB. Pages that were read are released to the
    kernel, in a worker after every batch: they stay in the kernel's cache, but no longer count as memory of
    the process.
    """

    path: Path
    mapped: mmap.mmap = field(repr=False)
    places: dict[str, Place]
    crcs: tuple[int, ...]
    vocabulary: int = 0  # pyright: ignore[reportIncompatibleVariableOverride]
    _touched: list[int] = field(default_factory=lambda: [0], repr=False)

    @cached_property
    def checksum(self) -> str:
        """Checksum of all tokens, document ends and label marks, as stored in the file."""
        return checksum_of(self.crcs)

    def read(
        self, begins: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[NDArray[np.integer], NDArray[np.bool_] | None]:
        """The tokens of these spans of the flat array, concatenated, and which of them are labels (None: all)."""
        found = super().read(begins, sizes)
        self._touched[0] += len(sizes) * _AROUND + int(sizes.sum()) * self.tokens.itemsize
        # A worker releases pages after every batch, because pages that only one process maps count as its own
        # memory.
        if self._touched[0] > (_HELD if get_worker_info() is None else 0):
            self.give_back()
        return found

    def give_back(self) -> None:
        """Unmap the file's pages from this process; they stay in the kernel's cache."""
        self._touched[0] = 0
        if hasattr(mmap, "MADV_DONTNEED"):
            self.mapped.madvise(mmap.MADV_DONTNEED)

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped, (self.path, self.places, self.crcs, self.vocabulary)


class UnwritableError(Exception):
    """A file can't be written."""


def read_store(path: Path, *, verify: bool = False) -> MappedStore:
    """The store in a file, mapped.

    Args:
        path: the file.
        verify: compare every array with its checksum, about a second a gigabyte.

    Raises:
        ValueError: the file is broken, truncated or of another format.
        OSError: it can't be opened.
    """
    import pyarrow

    mapped = _mapping(path)
    buffer = pyarrow.py_buffer(mapped)
    try:
        stream = pyarrow.ipc.open_stream(buffer)
        batch = stream.read_next_batch()
    except (pyarrow.ArrowException, OSError, StopIteration) as error:
        raise ValueError(f"it is no whole Arrow file: {error or 'it has no rows'}") from None
    about = json.loads((stream.schema.metadata or {}).get(_METADATA, b"{}"))
    if about.get("format") != FORMAT:
        raise ValueError(f"it has format {about.get('format')}, this version writes {FORMAT}")
    arrays = {"tokens": batch.column("input_ids").values, "offsets": batch.column("input_ids").offsets}
    if "learned" in batch.schema.names:
        arrays["learned"] = batch.column("learned").values
    places = {name: _place(array, buffer.address) for name, array in arrays.items()}
    store = _mapped(path, places, tuple(about["crcs"]), about["vocabulary"])
    offsets = store.offsets
    if len(offsets) < 1 or int(offsets[0]) != 0 or int(offsets[-1]) != len(store.tokens):
        raise ValueError("its offsets don't fit its tokens")
    if verify:
        for name, crc in zip(places, store.crcs, strict=True):
            if crc_of(getattr(store, name)) != crc:
                raise ValueError(f"the checksum of its {name} is wrong")
        store.give_back()
    return store


def write_store(stores: Iterable[TokenStore], path: Path) -> None:
    """Write all documents of some stores into one file, as they arrive; it appears whole or not at all.

    Tokens and labels are first collected in unnamed temporary files, which need as much disk space as the
    file itself and vanish with the process, however it ends.

    Raises:
        UnwritableError: the folder can't be written to or is full, or pyarrow is missing.
    """
    if find_spec("pyarrow") is None:  # a bare machine, without the package's requirements
        raise UnwritableError(f"{path} can't be written (pyarrow is not installed)")
    with _writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        spool = _Spool(path.parent)
    with spool:
        for store in stores:
            with _writable(path):
                spool.add(store)
        with _writable(path):
            _drop_stale(path)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".part")
            os.close(handle)
            try:
                spool.write_to(Path(name))
                os.replace(name, path)
            finally:
                Path(name).unlink(missing_ok=True)


class _Spool:
    """Collects tokens and label marks in files, lengths in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = contextlib.ExitStack()
        self._tokens, self._learned = self._new(), self._new()
        self._lengths: list[NDArray[np.int64]] = []
        self._count, self._vocabulary, self._is_all_learned = 0, 0, True

    def __enter__(self) -> "_Spool":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def add(self, store: TokenStore) -> None:
        kind = token_type(self._vocabulary)
        self._vocabulary = max(self._vocabulary, store.vocabulary)
        if (wider := token_type(self._vocabulary)) is not kind:
            self._widen(np.dtype(kind), np.dtype(wider))
        if store.learned is not None and self._is_all_learned:
            self._is_all_learned = False
            for begin in range(0, self._count, _BLOCK):
                self._learned.write(b"\1" * min(_BLOCK, self._count - begin))
        if not self._is_all_learned:
            self._learned.write(learned_of(store).tobytes())
        self._tokens.write(store.tokens.astype(wider, copy=False).tobytes())
        self._lengths.append(store.lengths)
        self._count += len(store.tokens)

    def write_to(self, path: Path) -> None:
        import pyarrow

        offsets = offsets_of(np.concatenate([np.zeros(0, np.int64), *self._lengths]))
        columns = {"input_ids": self._values(self._tokens, np.dtype(token_type(self._vocabulary)))}
        if not self._is_all_learned:
            columns["learned"] = self._values(self._learned, np.dtype(np.uint8))
        arrays = [columns["input_ids"], offsets, *list(columns.values())[1:]]
        about = {
            "format": FORMAT,
            "vocabulary": self._vocabulary,
            "crcs": [crc_of(array) for array in arrays],
        }
        batch = pyarrow.record_batch(
            {
                name: pyarrow.LargeListArray.from_arrays(_arrow(offsets), _arrow(values))
                for name, values in columns.items()
            }
        ).replace_schema_metadata({_METADATA: json.dumps(about)})
        options = pyarrow.ipc.IpcWriteOptions(allow_64bit=True)
        with (
            pyarrow.OSFile(str(path), "wb") as sink,
            pyarrow.ipc.new_stream(sink, batch.schema, options=options) as writer,
        ):
            writer.write_batch(batch)

    def _new(self) -> IO[bytes]:
        return self._files.enter_context(tempfile.TemporaryFile(dir=self._folder))

    def _values(self, file: IO[bytes], kind: np.dtype) -> NDArray[Any]:
        file.flush()
        return np.memmap(file, kind, "r", shape=(self._count,)) if self._count else np.zeros(0, kind)

    def _widen(self, narrow: np.dtype, wide: np.dtype) -> None:
        before, self._tokens = self._tokens, self._new()
        before.seek(0)
        while block := before.read(_BLOCK):
            self._tokens.write(np.frombuffer(block, narrow).astype(wide).tobytes())
        before.close()


def _arrow(values: NDArray[Any]) -> Any:
    """The values as an Arrow array, not copied; `pyarrow.array` would import pandas, which takes a second."""
    import pyarrow

    kind = pyarrow.from_numpy_dtype(values.dtype)
    return pyarrow.Array.from_buffers(kind, len(values), [None, pyarrow.py_buffer(values)])


def _mapping(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _mapped(path: Path, places: dict[str, Place], crcs: tuple[int, ...], vocabulary: int) -> MappedStore:
    mapped = _mapping(path)
    arrays: dict[str, Any] = {
        name: np.frombuffer(mapped, kind, count, begin) for name, (kind, count, begin) in places.items()
    }
    return MappedStore(**arrays, path=path, mapped=mapped, places=places, crcs=crcs, vocabulary=vocabulary)


def _place(array: Any, address: int) -> Place:
    kind = np.dtype(np.bool_) if str(array.type) == "uint8" else np.dtype(array.type.to_pandas_dtype())
    buffer = array.buffers()[1]
    return kind.str, len(array), buffer.address - address if len(array) else 0


@contextlib.contextmanager
def _writable(path: Path) -> Any:
    """Distinguish an error of writing from one of the documents' source."""
    try:
        yield
    except OSError as error:
        raise UnwritableError(f"{path} can't be written ({error})") from error


def _drop_stale(path: Path) -> None:
    """Remove files left by processes that were killed at the end of a build."""
    for part in path.parent.glob(f"{path.stem}*.part*"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > _STALE_SECONDS:
                part.unlink()

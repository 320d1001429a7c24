"""Token stores in one file that processes map instead of reading: written whole, checked, never copied.

The file is a header of one page and the arrays, each from a page's beginning. The header is written last and names
the file's length and every array's CRC-32.
"""

import json
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from lightning_memkit.data.checksums import checksum_of, crc_of
from lightning_memkit.data.parts import drop_stale_parts, new_part
from lightning_memkit.data.store import TokenStore, learned_of, offsets_of, token_type

FORMAT = 1  # raise it when the file's layout changes
_MAGIC = b"memkit tokens\n"
_PAGE = 4096
_BLOCK = 2**22
# The kernel maps up to 16 pages around a place that is read; they are given back once they may have come to this.
_AROUND, _HELD = 16 * _PAGE, 2**26


@dataclass(frozen=True, kw_only=True)
class MappedStore(TokenStore):
    """A store whose arrays lie in a file: no memory of its own, one copy for all processes of a machine.

    Pickling it (a worker process that is not forked) passes the path. What a reader has touched is given back to
    the kernel, by a worker after every batch: the pages stay in its cache, but no longer count as the process's.
    """

    path: Path
    mapped: mmap.mmap = field(repr=False)
    _touched: list[int] = field(default_factory=lambda: [0], repr=False)
    _vocabulary: int = 0
    _crcs: tuple[int, ...] = ()

    @cached_property
    def checksum(self) -> str:
        """Of all tokens, of where documents end, and of what is learned: as the file's header has it."""
        return checksum_of(self._crcs)

    @cached_property
    def vocabulary(self) -> int:
        """Token ids are below this; 0 where there is no token."""
        return self._vocabulary

    def read(
        self, begins: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[NDArray[np.integer], NDArray[np.bool_] | None]:
        """The tokens of these spans of the flat array, end to end, and which of them are labels (None: all)."""
        found = super().read(begins, sizes)
        self._touched[0] += len(sizes) * _AROUND + int(sizes.sum()) * self.tokens.itemsize
        # A worker gives them back after every batch: what only one process maps counts as its own memory.
        if self._touched[0] > (_HELD if get_worker_info() is None else 0):
            self.give_back()
        return found

    def give_back(self) -> None:
        """Takes the file's pages out of this process; they stay in the kernel's cache."""
        self._touched[0] = 0
        if hasattr(mmap, "MADV_DONTNEED"):
            self.mapped.madvise(mmap.MADV_DONTNEED)

    def __reduce__(self) -> tuple[Any, ...]:
        return read_store, (self.path,)


def read_store(path: Path, *, verify: bool = False) -> MappedStore:
    """The store in a file, mapped.

    Args:
        path: of the file.
        verify: compares every array with its checksum, about a second a gigabyte.

    Raises:
        ValueError: the file is broken, cut short or of another format.
        OSError: it can't be opened.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = _header(file, size)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    arrays = {}
    for name, about in header["arrays"].items():
        arrays[name] = np.frombuffer(mapped, about["type"], about["count"], about["begin"])
        if verify and crc_of(arrays[name]) != about["crc32"]:
            raise ValueError(f"the checksum of its {name} is wrong")
    crcs = tuple(about["crc32"] for about in header["arrays"].values())
    store = MappedStore(**arrays, path=path, mapped=mapped, _vocabulary=header["vocabulary"], _crcs=crcs)
    offsets = store.offsets
    if len(offsets) < 1 or int(offsets[0]) != 0 or int(offsets[-1]) != len(store.tokens):
        raise ValueError("its offsets don't fit its tokens")
    if verify:
        store.give_back()
    return store


def write_store(stores: Iterable[TokenStore], path: Path) -> None:
    """All documents of some stores into one file, as they come; it appears whole or not at all.

    What processes that were killed while they wrote the same file have left is removed.

    Raises:
        UnwritableError: the folder can't be written to, or is full.
    """
    with _writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        drop_stale_parts(path)
        part, lock = new_part(path)
    beside = Path(f"{part}.learned")
    try:
        writer = _Writer(part, beside)
        try:
            for store in stores:
                with _writable(path):
                    writer.add(store)
            with _writable(path):
                writer.finish()
        finally:
            writer.close()
        with _writable(path):
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
        beside.unlink(missing_ok=True)
        lock.close()


class UnwritableError(Exception):
    """A file can't be written."""


class _writable:  # noqa: N801 # reads as what it is used for
    """Tells an error of writing from one of the documents' source."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if isinstance(error, OSError):
            raise UnwritableError(f"{self._path} can't be written ({error})") from error


class _Writer:
    """Tokens go straight to the file; lengths wait in memory, and what is learned in a second file."""

    def __init__(self, part: Path, beside: Path) -> None:
        self._tokens: IO[bytes] = part.open("r+b")
        self._tokens.seek(_PAGE)
        self._beside = beside
        self._learned: IO[bytes] | None = None
        self._lengths: list[NDArray[np.int64]] = []
        self._count, self._vocabulary = 0, 0
        self._type: np.dtype = np.dtype(np.uint16)

    def add(self, store: TokenStore) -> None:
        self._vocabulary = max(self._vocabulary, store.vocabulary)
        if store.tokens.dtype == np.uint8 and self._count == 0:
            self._type = np.dtype(np.uint8)
        needed = np.promote_types(self._type, store.tokens.dtype)
        needed = needed if needed == np.uint8 else np.dtype(token_type(self._vocabulary))
        if needed.itemsize > self._type.itemsize:
            self._widen(needed)
        if store.learned is not None and self._learned is None:
            self._learned = self._beside.open("w+b")
            self._learned.write(b"\1" * self._count)
        if self._learned is not None:
            self._learned.write(learned_of(store).tobytes())
        self._tokens.write(store.tokens.astype(self._type, copy=False).tobytes())
        self._lengths.append(store.lengths)
        self._count += len(store.tokens)

    def finish(self) -> None:
        arrays = {"tokens": self._described(self._type, self._count, _PAGE)}
        lengths = np.concatenate(self._lengths) if self._lengths else np.zeros(0, np.int64)
        offsets = offsets_of(lengths)
        arrays["offsets"] = self._append([offsets.tobytes()], offsets.dtype, len(offsets))
        if self._learned is not None:
            self._learned.seek(0)
            arrays["learned"] = self._append(
                _blocks(self._learned, self._count), np.dtype(np.bool_), self._count
            )
        header = {
            "format": FORMAT, "vocabulary": self._vocabulary, "bytes": self._tokens.tell(), "arrays": arrays,
        }  # fmt: skip
        text = json.dumps(header).encode()
        self._tokens.seek(0)
        self._tokens.write(_MAGIC + f"{zlib.crc32(text):08x}{len(text):08x}".encode() + text)

    def close(self) -> None:
        self._tokens.close()
        if self._learned is not None:
            self._learned.close()

    def _append(self, blocks: Iterable[bytes], kind: np.dtype, count: int) -> dict[str, Any]:
        begin = -(-self._tokens.tell() // _PAGE) * _PAGE
        self._tokens.write(b"\0" * (begin - self._tokens.tell()))
        for block in blocks:
            self._tokens.write(block)
        return self._described(kind, count, begin)

    def _described(self, kind: np.dtype, count: int, begin: int) -> dict[str, Any]:
        self._tokens.flush()
        end = self._tokens.tell()
        self._tokens.seek(begin)
        crc = 0
        for block in _blocks(self._tokens, count * kind.itemsize):
            crc = zlib.crc32(block, crc)
        self._tokens.seek(end)
        return {"type": kind.str, "count": count, "begin": begin, "crc32": crc}

    def _widen(self, kind: np.dtype) -> None:
        """Rewrites what is there, from its end so that nothing is written over before it is read."""
        before, self._type = self._type, kind
        left = self._count
        while left:
            number = min(left, _BLOCK)
            left -= number
            self._tokens.seek(_PAGE + left * before.itemsize)
            block = np.frombuffer(self._tokens.read(number * before.itemsize), before)
            self._tokens.seek(_PAGE + left * kind.itemsize)
            self._tokens.write(block.astype(kind).tobytes())
        self._tokens.seek(_PAGE + self._count * kind.itemsize)


def _header(file: IO[bytes], size: int) -> dict[str, Any]:
    page = file.read(_PAGE)
    if not page.startswith(_MAGIC):
        raise ValueError("it is no file of tokens, or was cut short")
    text = page[len(_MAGIC) :]
    try:
        crc, length = int(text[:8], 16), int(text[8:16], 16)
    except ValueError:
        raise ValueError("its header is broken") from None
    text = text[16 : 16 + length]
    if zlib.crc32(text) != crc:
        raise ValueError("its header is broken")
    header = json.loads(text)
    if header["format"] != FORMAT:
        raise ValueError(f"it has format {header['format']}, this version writes {FORMAT}")
    if header["bytes"] != size:
        raise ValueError(f"it has {size:,} bytes instead of {header['bytes']:,}")
    return header


def _blocks(file: IO[bytes], count: int) -> Iterator[bytes]:
    while count:
        block = file.read(min(count, _BLOCK))
        count -= len(block)
        yield block

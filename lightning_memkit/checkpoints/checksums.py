"""Checksums that are computed while a file is written, and verified before anything of it is loaded.

Each 4 MiB have a 64-bit xxh3: threads verify them in parallel, a rank verifies only what it reads, and the
error names the bytes. They detect damage by disks, networks and copies, not deliberate changes.
"""

import logging
import mmap
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from xxhash import xxh3_64, xxh3_64_digest

from lightning_memkit.checkpoints.errors import CheckpointError

CHUNK_BYTES = 4 * 1024**2
REMEDY = "Load another checkpoint, or copy this one again."
DIGEST_BYTES = 8
# what verifying threads hold in memory together; fewer, larger pieces are mapped and unmapped faster
_HELD_BYTES = 4 * 1024**2
_THREADS = 4  # two saturate a desktop's memory; more help with network file systems
_CACHED_BYTES = 2 * 1024**2  # the largest write that is still in cache after hashing

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Checksums:
    """Checksums of a file's bytes from its start.

    Args:
        size: the number of these bytes.
        first: bytes in the first chunk; all others have `CHUNK_BYTES`, the last one the remainder.
        digests: of the chunks.
    """

    size: int
    first: int
    digests: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.size or len(self.digests) != number_of_chunks(self.size - self.first):
            raise ValueError(
                f"{len(self.digests)} checksums, the first of {self.first} bytes, are not those of {self.size} bytes."
            )

    def chunk_of(self, offset: int) -> int:
        """The index of the chunk that contains a byte."""
        return 0 if offset < self.first else 1 + (offset - self.first) // CHUNK_BYTES

    def chunks_of(self, begin: int, end: int) -> range:
        """The indices of the chunks with a range of bytes; an empty range gives the chunk at its place."""
        return range(self.chunk_of(begin), self.chunk_of(max(begin, end - 1)) + 1)

    def range_of(self, chunk: int) -> tuple[int, int]:
        """The first byte of a chunk, and the byte after its last."""
        end = self.first + chunk * CHUNK_BYTES
        return (max(0, end - CHUNK_BYTES) if chunk else 0), min(end, self.size)


def number_of_chunks(bytes_after_first: int) -> int:
    """How many chunks there are, including the first."""
    return 1 + -(-bytes_after_first // CHUNK_BYTES)


class Hasher:
    """Computes the checksums of a stream.

    Args:
        first: bytes in the first chunk.
    """

    def __init__(self, first: int = CHUNK_BYTES) -> None:
        self._first, self._left = first, first
        self._size = 0
        self._hash = xxh3_64()
        self._digests: list[int] = []

    def update(self, data: Any) -> None:
        """Hash the next bytes."""
        view = memoryview(data).cast("B")
        self._size += len(view)
        while len(view):
            if self._left == 0:
                self._close_chunk()
            part = view[: self._left]
            self._hash.update(part)
            self._left -= len(part)
            view = view[len(part) :]

    def checksums(self) -> Checksums:
        """The checksums of all bytes; call it once, at the end."""
        self._digests.append(self._hash.intdigest())
        return Checksums(size=self._size, first=min(self._first, self._size), digests=tuple(self._digests))

    def _close_chunk(self) -> None:
        self._digests.append(self._hash.intdigest())
        self._hash.reset()
        self._left = CHUNK_BYTES


class HashedWriter:
    """Writes to a file and hashes what it writes, 2 MiB at a time, so that the write finds them in cache.

    Args:
        file: has a method `write` that may write less than it is given.
        first: bytes in the first chunk.
    """

    def __init__(self, file: Any, first: int = CHUNK_BYTES) -> None:
        self._file = file
        self._hasher = Hasher(first)

    def write(self, data: Any) -> int:
        """Write all of it."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _CACHED_BYTES):
            part = view[start : start + _CACHED_BYTES]
            self._hasher.update(part)
            write_all(self._file, part)
        return len(view)

    def checksums(self) -> Checksums:
        """The checksums of all that was written; call it once, at the end."""
        return self._hasher.checksums()


def write_all(file: Any, view: memoryview) -> None:
    """Write a whole view; unbuffered files may write less than they are given."""
    while len(view):
        written = file.write(view)
        view = view[written if isinstance(written, int) else len(view) :]


def check(path: Path, checksums: Checksums, chunks: Iterable[int] | None = None) -> None:
    """Read chunks of a file in several threads and verify them; holds 4 MiB at most.

    Args:
        path: the path of the file.
        checksums: those computed when it was written.
        chunks: the chunks to verify; None for all.

    Raises:
        CheckpointError: the file is cut off, or some of its bytes have changed.
    """
    found = path.stat().st_size
    if found < checksums.size:
        raise CheckpointError(
            f"{path} is damaged and can't be loaded: it was cut off and has {found:,} of at least "
            f"{checksums.size:,} bytes. {REMEDY}"
        )
    wanted = sorted(set(range(len(checksums.digests)) if chunks is None else chunks))
    count = min(_THREADS, os.cpu_count() or 1, len(wanted))
    if count <= 1:
        changed = _first_changed(path, checksums, wanted, _HELD_BYTES)
    else:
        parts = [
            list(islice(wanted, number, None, count)) for number in range(count)
        ]  # interleaved, so that threads read neighbouring chunks
        with ThreadPoolExecutor(count, thread_name_prefix="memkit-checksums") as threads:
            results = threads.map(
                lambda part: _first_changed(path, checksums, part, _HELD_BYTES // count), parts
            )
            changed = min((chunk for chunk in results if chunk is not None), default=None)
    if changed is not None:
        start, end = checksums.range_of(changed)
        raise CheckpointError(
            f"{path} is damaged and can't be loaded: by their checksum its bytes {start:,} to {end:,} are not those "
            f"that were written. {REMEDY}"
        )


@cache
def say_unchecked(path: Path) -> None:
    """Log once for each file that it has no checksums, because an earlier memkit or Lightning saved it."""
    _log.warning(
        "%s has no checksums: flipped bytes in it would not be noticed. Save it again to add them.",
        path,
    )


def digest(data: Any) -> bytes:
    """The checksum of a table of checksums."""
    return xxh3_64_digest(data)


def _first_changed(path: Path, checksums: Checksums, chunks: Iterable[int], held: int) -> int | None:
    with path.open("rb", buffering=0) as file, closing(_View(file)) as view:
        for chunk in chunks:
            found = xxh3_64()
            for start in range(*checksums.range_of(chunk), held):
                view.into(found, start, min(start + held, checksums.range_of(chunk)[1]))
            if found.intdigest() != checksums.digests[chunk]:
                return chunk
    return None


class _View:
    """A file's bytes, memory-mapped if possible: a third faster than copying them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._map: mmap.mmap | None = None
        if hasattr(mmap, "MADV_DONTNEED"):  # without it, pages read would count as used memory
            with suppress(OSError, ValueError):  # some network file systems can't, nor can empty files
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def into(self, found: xxh3_64, start: int, end: int) -> None:
        """Hash a range of bytes."""
        if self._map is None:
            self._file.seek(start)
            found.update(self._file.read(end - start))
            return
        with memoryview(self._map) as whole, whole[start:end] as part:
            found.update(part)
        first_page = start - start % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, first_page, end - first_page)

    def close(self) -> None:
        """Close the map."""
        if self._map is not None:
            self._map.close()

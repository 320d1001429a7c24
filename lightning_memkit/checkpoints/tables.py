"""A table of checksums as the last tensor of a safetensors file, written after the rest.

Its layout: 8 bytes for each chunk; how many bytes it covers; how many of them are in the first chunk; the
table's own checksum; eight letters that identify it. Little-endian.
"""

import struct
from pathlib import Path

from lightning_memkit.checkpoints.checksums import (
    DIGEST_BYTES,
    REMEDY,
    Checksums,
    digest,
    number_of_chunks,
)
from lightning_memkit.checkpoints.errors import CheckpointError

_SIZES = struct.Struct("<QQ")
_MAGIC = b"memkitx3"
_END_BYTES = _SIZES.size + DIGEST_BYTES + len(_MAGIC)


def table_bytes(bytes_after_first: int) -> int:
    """The length of the table of a file with this many bytes after its first chunk."""
    return number_of_chunks(bytes_after_first) * DIGEST_BYTES + _END_BYTES


def pack_table(checksums: Checksums) -> bytes:
    """The bytes of a table."""
    content = struct.pack(f"<{len(checksums.digests)}Q", *checksums.digests)
    content += _SIZES.pack(checksums.size, checksums.first)
    return content + digest(content) + _MAGIC


def read_table(path: Path) -> Checksums | None:
    """The checksums at the end of a file; None if there is no table.

    Raises:
        CheckpointError: the table is damaged or belongs to another file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - _END_BYTES))
        end = file.read(_END_BYTES)
        if len(end) < _END_BYTES or not end.endswith(_MAGIC):
            return None
        covered, first = _SIZES.unpack_from(end)
        length = size - covered
        if not first <= covered < size or length != table_bytes(covered - first):
            raise _damaged(path)
        file.seek(covered)
        table = file.read(length)
    content = table[: -len(_MAGIC) - DIGEST_BYTES]
    if not table.startswith(content + digest(content)):
        raise _damaged(path)
    digests = struct.unpack(f"<{number_of_chunks(covered - first)}Q", content[: -_SIZES.size])
    return Checksums(size=covered, first=first, digests=digests)


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged and can't be loaded: its table of checksums is not the one that was written. {REMEDY}"
    )

"""A document as one safetensors file, written tensor by tensor and read through a memory map.

The library's own `save_file` needs all tensors in host memory at once. Here the format (a length, a JSON
header, the bytes) is written chunk by chunk into any file object; the library reads it. The last tensor is a
table of checksums of all bytes before it, which a load verifies first.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from lightning_memkit.checkpoints import checksums, tables
from lightning_memkit.checkpoints.checksums import HashedWriter, write_all
from lightning_memkit.checkpoints.documents import RESERVED, Document, decode, dtype_of
from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.checkpoints.names import readable_name

PIECE_BYTES = 16 * 1024**2  # copied from a device to the file at a time
STRUCTURE, TABLE = RESERVED[1:]  # tensors that hold the structure's JSON, and the checksums
FORMAT = "memkit"  # the header's entry with the version of the format
_VERSION = "2"
WITHOUT_CHECKSUMS = "1"
_HEADER_LIMIT = 100_000_000  # of the library, in bytes
_DTYPES = {  # supported by safetensors from 0.4.5 on; others are written as bytes
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}


class Writable(Protocol):
    """What a document is written into, such as a file."""

    def write(self, data: Any, /) -> Any:
        """Write the next bytes."""


def write(document: Document, file: Writable, *, with_checksums: bool = True) -> None:
    """Write a document; at most a chunk of 16 MiB and one non-contiguous tensor are copied at a time.

    Args:
        document: what `encode` returned.
        file: receives the bytes in order.
        with_checksums: False writes the older format without checksums.
    """
    foreign = {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in document.tensors.items()
        if tensor.dtype not in _DTYPES
    }
    try:
        content = json.dumps({"state": document.structure, "as_bytes": foreign}, separators=(",", ":"))
    except (ValueError, RecursionError) as error:  # such as an integer with more digits than Python converts
        raise CheckpointError(
            f"The state can't be written as JSON ({error}); save that entry as text."
        ) from error
    structure = torch.frombuffer(bytearray(content.encode()), dtype=torch.uint8)
    tensors = _ordered({**document.tensors, STRUCTURE: structure})
    # Names of omitted tied weights, as safetensors' own `save_model` writes them.
    version = _VERSION if with_checksums else WITHOUT_CHECKSUMS
    metadata = {**document.aliases, FORMAT: version}
    if not with_checksums:
        _write(tensors, metadata, file)
        return
    data_bytes = sum(tensor.nbytes for _, tensor in tensors)
    start = _start(tensors, metadata, tables.table_bytes(data_bytes))
    hashed = HashedWriter(file, first=len(start))
    hashed.write(start)
    for piece in chain.from_iterable(_pieces(tensor) for _, tensor in tensors):
        hashed.write(piece)
    write_all(file, memoryview(tables.pack_table(hashed.checksums())))


def write_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], file: Writable) -> None:
    """Write tensors sequentially as a plain safetensors file; tied ones may occur only once."""
    _write(_ordered(tensors), metadata, file)


def read(path: Path, *, checked: bool = True) -> Any:
    """The state in a file; its tensors are a private memory map, which takes memory as it is read.

    Args:
        path: the path of the file.
        checked: False skips the checksums.

    Raises:
        CheckpointError: the file is damaged, or was not written by `write`.
    """
    try:
        found = tables.read_table(path)
        if found is not None and checked:
            checksums.check(path, found)
        state, version = _read(path)
        if found is None and version == _VERSION:
            raise ValueError("its table of checksums is missing")
    except CheckpointError as error:
        raise error if str(path) in str(error) else CheckpointError(f"{path}: {error}") from error
    except OSError:
        raise
    except Exception as error:  # any kind: damaged data may look like anything
        raise CheckpointError(
            f"{path} is damaged and can't be loaded ({type(error).__name__}: {error}): it was cut off or changed "
            f"after it was written. {checksums.REMEDY}"
        ) from error
    if found is None:
        checksums.say_unchecked(path)
    return state


def _read(path: Path) -> tuple[Any, str]:
    """The state, and the version of the format."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        _parsed(
            file.read(min(length, path.stat().st_size))
        )  # refuse duplicates: the library would silently use the last one
    with opened(path) as file:
        metadata = file.metadata() or {}
        version = metadata.get(FORMAT)
        if version not in (_VERSION, WITHOUT_CHECKSUMS):
            raise CheckpointError(_not_ours(path, metadata))
        content = _parsed(bytes(file.get_tensor(STRUCTURE).numpy()))
        foreign = content["as_bytes"]

        def tensor_of(name: str) -> Tensor:
            tensor = file.get_tensor(name)
            return _from_bytes(tensor, *foreign[name]) if name in foreign else tensor

        return decode(content["state"], tensor_of), version


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A file, opened by the safetensors library."""
    with readable_name(path) as name, safe_open(name, framework="pt") as file:
        yield file


def _parsed(text: bytes) -> Any:
    return json.loads(text, object_pairs_hook=_without_duplicates)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it names {next(name for name in names if names.count(name) > 1)!r} twice")
    return found


def is_safetensors(path: Path) -> bool:
    """Whether a file begins like a safetensors file; pickles and zips never do."""
    with path.open("rb") as file:
        start = file.read(9)
    return len(start) == 9 and int.from_bytes(start[:8], "little") <= _HEADER_LIMIT and start[8:] == b"{"


def _ordered(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Tensors with large elements first, so that each is aligned to its element size in the map."""
    return sorted(tensors.items(), key=lambda item: -_element_bytes(item[1]))


def _write(tensors: list[tuple[str, Tensor]], metadata: Mapping[str, str], file: Writable) -> None:
    file.write(_start(tensors, metadata))
    for piece in chain.from_iterable(_pieces(tensor) for _, tensor in tensors):
        write_all(file, piece)


def _start(tensors: list[tuple[str, Tensor]], metadata: Mapping[str, str], table_bytes: int = 0) -> bytes:
    """The header's length and the header."""
    sizes = [tensor.nbytes for _, tensor in tensors]
    ends = list(accumulate(sizes, initial=0))[1:]
    entries: dict[str, Any] = {"__metadata__": {**metadata, "format": "pt"}}
    for (name, tensor), size, end in zip(tensors, sizes, ends, strict=True):
        known = tensor.dtype in _DTYPES
        shape = list(tensor.shape) if known else [size]
        entries[name] = _entry(_DTYPES.get(tensor.dtype, "U8"), shape, end - size, size)
    if table_bytes:
        entries[TABLE] = _entry("U8", [table_bytes], sum(sizes), table_bytes)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_LIMIT:
        raise CheckpointError(
            f"The checkpoint has {len(tensors):,} tensors, whose names and shapes take {len(text):,} bytes; "
            f"safetensors allows {_HEADER_LIMIT:,}. Save fewer, larger tensors."
        )
    return len(text).to_bytes(8, "little") + text


def _entry(dtype: str, shape: list[int], start: int, size: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, one chunk at a time in host memory."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.numel():
        # A single element counts as contiguous whatever its stride, and then has no view as bytes.
        flat = flat.as_strided(flat.shape, (1,))
        for piece in flat.view(torch.uint8).split(PIECE_BYTES):
            yield piece.cpu().numpy().data


def _from_bytes(tensor: Tensor, dtype: str, shape: list[int]) -> Tensor:
    wanted = dtype_of(dtype)
    if tensor.storage_offset() % wanted.itemsize:
        tensor = tensor.clone()
    return tensor.view(wanted).reshape(shape)


def _element_bytes(tensor: Tensor) -> int:
    return tensor.element_size() if tensor.dtype in _DTYPES else 16


def _not_ours(path: Path, metadata: dict[str, str]) -> str:
    if FORMAT in metadata:
        return (
            f"{path} is of version {metadata[FORMAT]} of the format and this memkit reads versions up to {_VERSION}; "
            "install the memkit that wrote it."
        )
    return (
        f"{path} holds tensors only, not a checkpoint; read it with safetensors.torch.load_file and give the weights "
        "to module.load_state_dict."
    )

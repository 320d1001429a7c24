"""A document as one safetensors file, written tensor by tensor and read through a memory map.

The library's own `save_file` wants every tensor in host memory at once; the format (a length, a JSON header, the
bytes) is written here piece by piece instead, into any file object. Reading is the library's.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_memkit.checkpoints.documents import RESERVED, Document, decode
from lightning_memkit.checkpoints.errors import CheckpointError

PIECE_BYTES = 16 * 1024**2  # what is on its way from a device to the file at any time
STRUCTURE = RESERVED[1]  # the tensor that holds the JSON of what is no tensor
_FORMAT = "memkit"  # the header's entry that says which version wrote it
_VERSION = "1"
_HEADER_LIMIT = 100_000_000  # the library's, in bytes
_DTYPES = {  # those that every safetensors from 0.4.5 on reads; others are written as bytes
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
    """What a document is written into: a file, or a stream to elsewhere."""

    def write(self, data: Any, /) -> Any:
        """Take the next bytes."""


def write(document: Document, file: Writable) -> None:
    """Write a document; at most a piece of 16 MiB and one tensor that is not contiguous are copied at a time."""
    foreign = {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in document.tensors.items()
        if tensor.dtype not in _DTYPES
    }
    content = json.dumps({"state": document.structure, "as_bytes": foreign}, separators=(",", ":"))
    # Aliases as safetensors' own `save_model` says which names of tied weights it has left out.
    structure = torch.frombuffer(bytearray(content.encode()), dtype=torch.uint8)
    write_tensors({**document.tensors, STRUCTURE: structure}, {**document.aliases, _FORMAT: _VERSION}, file)


def write_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], file: Writable) -> None:
    """Write tensors as a safetensors file, one after the other; tied ones have to be in there once."""
    # Large elements first: every tensor is then aligned to its elements in the map.
    ordered = sorted(tensors.items(), key=lambda item: -_element_bytes(item[1]))
    header = _header(ordered, metadata)
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    for piece in chain.from_iterable(_pieces(tensor) for _, tensor in ordered):
        _write_all(file, piece)


def read(path: Path) -> Any:
    """The state in a file; its tensors are a private map of it: they take memory as they are read.

    Raises:
        CheckpointError: the file is damaged, or not one that `write` wrote.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get(_FORMAT) != _VERSION:
                raise CheckpointError(_not_ours(path, metadata))
            content = json.loads(bytes(file.get_tensor(STRUCTURE).numpy()))
            foreign = content["as_bytes"]

            def tensor_of(name: str) -> Tensor:
                tensor = file.get_tensor(name)
                return _from_bytes(tensor, *foreign[name]) if name in foreign else tensor

            return decode(content["state"], tensor_of)
    except (SafetensorError, json.JSONDecodeError, KeyError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} is damaged and can't be loaded ({error}): it was cut off or changed after it was written. "
            "Load another checkpoint, or copy this one again."
        ) from error


def is_safetensors(path: Path) -> bool:
    """Whether a file begins as safetensors files do; a pickle or a zip never does."""
    with path.open("rb") as file:
        start = file.read(9)
    return len(start) == 9 and int.from_bytes(start[:8], "little") <= _HEADER_LIMIT and start[8:] == b"{"


def _header(tensors: list[tuple[str, Tensor]], metadata: Mapping[str, str]) -> bytes:
    sizes = [tensor.numel() * tensor.element_size() for _, tensor in tensors]
    ends = list(accumulate(sizes))
    entries: dict[str, Any] = {"__metadata__": {**metadata, "format": "pt"}}
    for (name, tensor), size, end in zip(tensors, sizes, ends, strict=True):
        known = tensor.dtype in _DTYPES
        shape = list(tensor.shape) if known else [size]
        entries[name] = {
            "dtype": _DTYPES.get(tensor.dtype, "U8"),
            "shape": shape,
            "data_offsets": [end - size, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_LIMIT:
        raise CheckpointError(
            f"The checkpoint has {len(tensors):,} tensors, whose names and shapes take {len(text):,} bytes; "
            f"safetensors allows {_HEADER_LIMIT:,}. Save fewer, larger tensors."
        )
    return text


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, in host memory one piece at a time."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.numel():
        for piece in flat.view(torch.uint8).split(PIECE_BYTES):
            yield piece.cpu().numpy().data


def _write_all(file: Writable, piece: memoryview) -> None:
    """Unbuffered files may take less than they are given."""
    while len(piece):
        written = file.write(piece)
        piece = piece[written if isinstance(written, int) else len(piece) :]


def _from_bytes(tensor: Tensor, dtype: str, shape: list[int]) -> Tensor:
    wanted: torch.dtype = getattr(torch, dtype)
    if tensor.storage_offset() % wanted.itemsize:
        tensor = tensor.clone()
    return tensor.view(wanted).reshape(shape)


def _element_bytes(tensor: Tensor) -> int:
    return tensor.element_size() if tensor.dtype in _DTYPES else 16


def _not_ours(path: Path, metadata: dict[str, str]) -> str:
    if _FORMAT in metadata:
        return (
            f"{path} is of version {metadata[_FORMAT]} of the format and this memkit reads version {_VERSION}; "
            "install the memkit that wrote it."
        )
    return (
        f"{path} holds tensors only, not a checkpoint; read it with safetensors.torch.load_file and give the weights "
        "to module.load_state_dict."
    )

"""Weights in files: safetensors and torch checkpoints, single or listed by an index."""

import json
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from lightning_memkit.checkpoints import checksums
from lightning_memkit.checkpoints.checksums import Checksums
from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.checkpoints.names import readable_name
from lightning_memkit.checkpoints.streamed import FORMAT, WITHOUT_CHECKSUMS, opened
from lightning_memkit.checkpoints.tables import read_table
from lightning_memkit.initialization.weight_source import Box, Entry, WeightSource, copy_in_pieces
from lightning_memkit.utilities.errors import WeightsError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class SafetensorsFile:
    """One safetensors file, mapped while a tensor is read; for a memkit checkpoint, the module's weights.

    Raises:
        WeightsError: it is cut short, no safetensors file, or its table of checksums is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries: dict[str, Entry] = {}
        with self._opened() as file:
            version = (file.metadata() or {}).get(FORMAT)
            states = version is not None
            for name in file.keys():  # noqa: SIM118 - not a dict
                if states and "/" in name:
                    continue  # one of a checkpoint's other states
                header = file.get_slice(name)
                kind = header.get_dtype()
                if kind not in _DTYPES:
                    raise WeightsError(
                        f"{path}: {name} is stored as {kind}, which torch can't load here; convert the file."
                    )
                self.entries[name] = Entry(tuple(header.get_shape()), _DTYPES[kind])
        self._checksums = _table_of(path, version) if states else None

    def check(self, wanted: Mapping[str, Box]) -> None:
        """Verify the chunks with these rows, and the header's, if the file is a memkit checkpoint."""
        if self._checksums is None:
            return
        chunks, places = {0}, _places_in(self._path)
        for name, box in wanted.items():
            begin, end = places[name]
            if box and end > begin:
                row_bytes = (end - begin) // self.entries[name].shape[0]
                begin, end = begin + box[0][0] * row_bytes, begin + box[0][1] * row_bytes
            if end > begin:
                chunks.update(self._checksums.chunks_of(begin, end))
        try:
            checksums.check(self._path, self._checksums, chunks)
        except CheckpointError as error:
            raise WeightsError(str(error)) from error

    def copy_into(self, name: str, box: Box, target: Tensor) -> None:
        """Copy a box of a tensor into `target`."""
        copy_in_pieces(lambda part: self._read(name, part), box, target)

    def _read(self, name: str, part: Box) -> Tensor:
        # Map the file anew for each chunk: pages that were read stay in this process's memory until the map
        # is closed.
        with self._opened() as file:
            return (
                file.get_slice(name)[tuple(slice(*ends) for ends in part)] if part else file.get_tensor(name)
            )

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        with ExitStack() as stack:
            try:
                file = stack.enter_context(opened(self._path))
            except (SafetensorError, OSError) as error:
                raise WeightsError(
                    f"{self._path} is cut short or no safetensors file ({error}); nothing was loaded: fetch it again."
                ) from error
            yield file


class TorchFile:
    """One file of `torch.save`, mapped, its pickle restricted to tensors; a `state_dict` inside it is used.

    Raises:
        WeightsError: it is cut short, of the format before torch 1.6, holds no tensors, or its pickle names
            code.
    """

    def __init__(self, path: Path) -> None:
        self._tensors = _tensors_of(_load(path), path)
        self.entries = {name: Entry(tuple(t.shape), t.dtype) for name, t in self._tensors.items()}

    def check(self, wanted: Mapping[str, Box]) -> None:
        """Do nothing: torch's checksums could be verified only by reading the whole file."""

    def copy_into(self, name: str, box: Box, target: Tensor) -> None:
        """Copy a box of a tensor into `target`."""
        stored = self._tensors[name]
        copy_in_pieces(lambda part: stored[tuple(slice(*ends) for ends in part)], box, target)


class IndexedFiles:
    """Tensors spread over the files that an index lists.

    Raises:
        WeightsError: the index can't be read, a file is missing, or a file lacks a tensor that the index
            lists.
    """

    def __init__(self, index: Path) -> None:
        try:
            places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise WeightsError(
                f"{index} is no index: it has no weight_map ({error!r}); fetch it again."
            ) from error
        files = sorted(set(places.values()))
        strange = [name for name in files if leaves_folder(name)]
        missing = [name for name in files if not (index.parent / name).is_file()]
        if strange or missing:
            raise WeightsError(
                f"{index} names {', '.join(strange or missing)}, "
                + ("outside its folder" if strange else f"not in {index.parent}")
                + f" ({len(strange or missing)} of {len(files)} files); nothing was loaded: fetch the whole folder."
            )
        opened = {name: open_file(index.parent / name) for name in files}
        self._places = {name: opened[file] for name, file in places.items()}
        lost = [name for name, source in self._places.items() if name not in source.entries]
        if lost:
            raise WeightsError(
                f"{index}: {lost[0]} is not in {places[lost[0]]} ({len(lost)} such names); nothing was loaded: index "
                "and files are of different models, so fetch both again."
            )
        self.entries = {name: source.entries[name] for name, source in self._places.items()}

    def check(self, wanted: Mapping[str, Box]) -> None:
        """Verify each file's tensors by its checksums."""
        for source in set(self._places.values()):
            source.check({name: box for name, box in wanted.items() if self._places[name] is source})

    def copy_into(self, name: str, box: Box, target: Tensor) -> None:
        """Copy a box of a tensor from the file that has it."""
        self._places[name].copy_into(name, box, target)


def _table_of(path: Path, version: str) -> Checksums | None:
    try:
        found = read_table(path)
    except CheckpointError as error:
        raise WeightsError(str(error)) from error
    if found is None and version != WITHOUT_CHECKSUMS:
        raise WeightsError(
            f"{path} is damaged and can't be loaded: its table of checksums is missing. {checksums.REMEDY}"
        )
    if found is None:
        checksums.say_unchecked(path)
    return found


def _places_in(path: Path) -> dict[str, tuple[int, int]]:
    """The first byte of each tensor in a safetensors file, and the byte after its last."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {
        name: (8 + length + entry["data_offsets"][0], 8 + length + entry["data_offsets"][1])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def leaves_folder(name: str) -> bool:
    """Whether a name in an index points outside the folder; links are allowed, as in Hugging Face's cache."""
    return os.path.isabs(name) or os.path.normpath(name).split(os.sep)[0] == os.pardir


def open_file(path: Path) -> WeightSource:
    """Open one file, recognised by name and first bytes: safetensors, or else a file of `torch.save`."""
    with path.open("rb") as file:
        start = file.read(
            9
        )  # safetensors start with a length and a JSON header; memkit checkpoints do, though named .ckpt
    return SafetensorsFile(path) if path.suffix == ".safetensors" or start[8:] == b"{" else TorchFile(path)


def _load(path: Path) -> Any:
    try:
        with readable_name(path) as name:
            return torch.load(name, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"{path}: its pickle holds more than tensors and plain data, which would run code; it was refused and "
            f"nothing was run ({str(error).splitlines()[0]}); save the weights as safetensors, or a state_dict alone."
        ) from error
    except Exception as error:  # any kind: torch executes damaged bytes as instructions
        if "mmap can only be used" in str(error):
            raise WeightsError(
                f"{path} is of torch's format before 1.6, which can't be mapped; load it and torch.save it once more."
            ) from error
        raise WeightsError(
            f"{path} is cut short or no torch checkpoint ({type(error).__name__}: "
            f"{next(iter(str(error).splitlines()), '')}); nothing was loaded: fetch it again."
        ) from error


def _tensors_of(content: Any, path: Path) -> dict[str, Tensor]:
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    found = content.items() if isinstance(content, dict) else ()
    tensors = {name: value for name, value in found if isinstance(value, Tensor)}
    if not tensors:
        keys = ", ".join(map(str, list(content)[:8])) if isinstance(content, dict) else type(content).__name__
        raise WeightsError(
            f"{path} holds no tensors by name but {keys}; give a file of a state_dict, or a Lightning checkpoint."
        )
    return tensors

"""Weights in a folder of torch.distributed.checkpoint, each rank reading only what it keeps."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_memkit.errors import WeightsError
from lightning_memkit.weights.files import leaves_folder
from lightning_memkit.weights.source import Box, Entry

_IN_LIGHTNING = "state_dict."
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": None,  # None: every class that the module itself defines
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "StorageMeta"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}


class DistributedFolder:
    """A folder that `torch.distributed.checkpoint.save` wrote; of Lightning's, the module's weights alone.

    Its `.metadata` is a pickle, which torch itself would load with all its code: here it may name torch's own
    records only.

    Raises:
        WeightsError: `.metadata` can't be read or names code, or a file is not there or cut short.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._metadata = _metadata_of(path)
        self._reader = FileSystemReader(path)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._refuse_cut_files()
        stored = {
            name: record
            for name, record in self._metadata.state_dict_metadata.items()
            if isinstance(record, TensorStorageMetadata)
        }
        inner = {name for name in stored if name.startswith(_IN_LIGHTNING)}
        self._names = {name.removeprefix(_IN_LIGHTNING): name for name in inner or stored}
        self.entries = {
            name: Entry(tuple(stored[full].size), stored[full].properties.dtype)
            for name, full in self._names.items()
        }

    def copy_into(self, name: str, box: Box, target: Tensor) -> None:
        """Write a box of a tensor, out of the stored pieces that it meets; one of those is in memory at a time."""
        full = self._names[name]
        record = self._metadata.state_dict_metadata[full]
        assert isinstance(record, TensorStorageMetadata)
        chunk = ChunkStorageMetadata(torch.Size([a for a, _ in box]), torch.Size([b - a for a, b in box]))
        items = create_read_items_for_chunk_list(full, record, [chunk])
        if target.numel():
            self._reader.read_data(LoadPlan(items), _Into(target)).wait()

    def _refuse_cut_files(self) -> None:
        for place in (self._metadata.storage_data or {}).values():
            file = self._path / place.relative_path
            if leaves_folder(place.relative_path):
                raise WeightsError(
                    f"{self._path}/.metadata names {file}, outside the folder: it was refused."
                )
            there = file.stat().st_size if file.is_file() else 0
            if there < place.offset + place.length:
                state = (
                    f"has {there} bytes of at least {place.offset + place.length}" if there else "is missing"
                )
                raise WeightsError(f"{file} {state}; nothing was loaded: copy the whole folder again.")


class _Into(LoadPlanner):
    """Tells torch's reader that every piece belongs into one tensor."""

    def __init__(self, target: Tensor) -> None:
        self._target = target

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the plan is made already."""

    def create_local_plan(self) -> LoadPlan:
        """Nothing."""
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing."""
        return global_plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Nothing."""
        return new_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Bytes are pickles and never asked for."""

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of the target that a stored piece fills."""
        part = self._target
        for dimension, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            part = part.narrow(dimension, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: the part is a view of the target."""


def _metadata_of(path: Path) -> Metadata:
    file = path / ".metadata"
    try:
        metadata = _Records(io.BytesIO(file.read_bytes())).load()
    except WeightsError:
        raise
    except Exception as error:  # a pickle that is cut short raises nearly anything
        raise WeightsError(
            f"{file} can't be read ({error!r}); nothing was loaded: copy the folder again."
        ) from error
    if not isinstance(metadata, Metadata):
        raise WeightsError(
            f"{file} holds a {type(metadata).__name__} and no torch.distributed.checkpoint metadata."
        )
    return metadata


class _Records(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Torch's records by name; anything else is refused before it is looked up."""
        allowed = _ALLOWED.get(module, set())
        if "." not in name and (allowed is None or name in allowed):
            found = super().find_class(module, name)
            if allowed is not None or getattr(found, "__module__", None) == module:
                return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise WeightsError(
            f".metadata names {module}.{name}, which is no record of torch.distributed.checkpoint and could run code: "
            "the folder was refused and nothing was run."
        )

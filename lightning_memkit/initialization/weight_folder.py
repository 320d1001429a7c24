"""Weights in a folder of torch.distributed.checkpoint, each rank reading only what it keeps."""

import io
from collections.abc import Mapping
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

from lightning_memkit.checkpoints.contents import read_contents
from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.checkpoints.folder_checksums import check_items
from lightning_memkit.initialization.weight_source import Box, Entry
from lightning_memkit.utilities.errors import WeightsError

_IN_LIGHTNING = "state_dict."


class DistributedFolder:
    """A folder that `torch.distributed.checkpoint.save` wrote; of Lightning's, the module's weights alone.

    Its `.metadata` is a pickle, which torch itself would load with all its code: here it may name torch's own
    records only.

    Raises:
        WeightsError: `.metadata` can't be read or names code, or a file is not there or cut short.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._metadata = read_contents(path, WeightsError)
        self._reader = FileSystemReader(path)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
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

    def check(self, wanted: Mapping[str, Box]) -> None:
        """Compare the chunks that the stored pieces of these boxes are in with the folder's checksums."""
        items = [item for name, box in wanted.items() for item in self._items(name, box)]
        try:
            check_items(self._path, self._metadata.storage_data or {}, items)
        except CheckpointError as error:
            raise WeightsError(str(error)) from error

    def copy_into(self, name: str, box: Box, target: Tensor) -> None:
        """Write a box of a tensor, out of the stored pieces that it meets; one of those is in memory at a time."""
        if not target.numel():
            return
        try:
            self._reader.read_data(LoadPlan(self._items(name, box)), _Into(target)).wait()
        except Exception as error:  # of whatever kind: torch reads what was changed as anything
            raise WeightsError(
                f"{self._path}: {name} can't be read ({type(error).__name__}: {str(error).splitlines()[0]}); the "
                "module has some of the weights. Copy the whole folder again, or load another checkpoint."
            ) from error

    def _items(self, name: str, box: Box) -> list[ReadItem]:
        full = self._names[name]
        record = self._metadata.state_dict_metadata[full]
        assert isinstance(record, TensorStorageMetadata)
        chunk = ChunkStorageMetadata(torch.Size([a for a, _ in box]), torch.Size([b - a for a, b in box]))
        return create_read_items_for_chunk_list(full, record, [chunk])


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

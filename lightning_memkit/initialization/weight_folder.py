"""Weights in a torch.distributed.checkpoint folder; each rank reads only its shard."""

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
    """A folder that `torch.distributed.checkpoint.save` wrote; of Lightning's, only the module's weights.

    Its `.metadata` is a pickle, which torch itself would load with any code in it: here it may contain only
    torch's own records.

    Raises:
        WeightsError: `.metadata` can't be read or names code, or a file is missing or cut short.
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
        """Verify the chunks that contain the stored shards of these boxes by the folder's checksums."""
        items = [item for name, box in wanted.items() for item in self._items(name, box)]
        try:
            check_items(self._path, self._metadata.storage_data or {}, items)
        except CheckpointError as error:
            raise WeightsError(str(error)) from error

    def copy_into(self, name: str, box: Box, target: Tensor) -> None:
        """Copy a box of a tensor from the stored shards that overlap it, with one in memory at a time."""
        if not target.numel():
            return
        try:
            self._reader.read_data(LoadPlan(self._items(name, box)), _Into(target)).wait()
        except Exception as error:  # any kind: damaged data may look like anything
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
    """Directs everything that torch's reader reads into one tensor."""

    def __init__(self, target: Tensor) -> None:
        self._target = target

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing: the plan exists already."""

    def create_local_plan(self) -> LoadPlan:
        """Return an empty plan, which is not used."""
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plan unchanged."""
        return global_plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return new_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Do nothing: bytes are pickles and never requested."""

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The view of the target that a stored shard fills."""
        part = self._target
        for dimension, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            part = part.narrow(dimension, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the part is a view of the target."""

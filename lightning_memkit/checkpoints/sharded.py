"""Checkpoints as folders of torch.distributed.checkpoint: each rank writes and reads its shard.

torch reads two parts of such a folder as pickles that may run code: the table of contents, and everything
that is no tensor. Here the former may contain only torch's own records, and the latter is read with
``weights_only=True``.
"""

import io
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from lightning_memkit.checkpoints.atomic import CONTENTS, new_folder, why_full
from lightning_memkit.checkpoints.checksums import say_unchecked
from lightning_memkit.checkpoints.contents import read_contents
from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.checkpoints.folder_checksums import (
    CheckedReader,
    HashingWriter,
    check_file,
    hashed_file,
    must_have_checksums,
    write_checksums,
)
from lightning_memkit.checkpoints.pickles import read_torch_file
from lightning_memkit.checkpoints.saveable import refuse_unsaveable
from lightning_memkit.utilities.progress import ProgressBar

REST = "meta.pt"  # Lightning's name for the unsharded rest
_AHEAD_BYTES = 10_000_000  # bytes copied from a device while earlier ones are written; torch's default
_Result = TypeVar("_Result")


def is_sharded(path: Path) -> bool:
    """Whether a path is a folder of torch.distributed.checkpoint."""
    return (path / CONTENTS).is_file()


def save_sharded(
    shares: dict[str, Any], rest: Any, target: Path, group: Any = None, *, checksums: bool = True
) -> None:
    """Write a folder with every rank's shard; it replaces ``target`` when it is complete.

    Every rank must call it with the same path on a shared file system.

    Args:
        shares: nested dicts and lists of tensors, sharded or not, and primitives.
        rest: tensors and primitives that rank 0 writes in addition (`meta.pt`).
        target: the path of the folder.
        group: a group of all ranks, for a thread that writes tensors in host memory while the ranks train;
            None for the training's own group.
        checksums: whether to write the checksums that a load verifies.

    Raises:
        CheckpointError: something is neither a tensor nor a primitive, or another rank could not write.
        OSError: the folder can't be written.
    """
    refuse_unsaveable(shares, rest)
    with ExitStack() as opened:
        partial = _first_does(lambda: opened.enter_context(new_folder(target)), group)
        # No copies from a device in a thread: it would use device 0, not the rank's.
        ahead = _AHEAD_BYTES if group is None else 0
        try:
            with _alone_or_not():
                writer = (
                    HashingWriter(partial, ahead)
                    if checksums
                    else dcp.FileSystemWriter(partial, per_thread_copy_ahead=ahead)
                )
                dcp.save(shares, storage_writer=writer, process_group=group)
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            full = why_full(cause, target)
            raise (
                _plain(error, f"{target} could not be written")
                if full is None
                else CheckpointError(f"{full[1]} It happened on rank {next(iter(error.failures))}.")
            ) from error

        def finish() -> None:
            found = writer.found if isinstance(writer, HashingWriter) else {}
            with hashed_file(partial / REST, "xb", found) as file:
                torch.save(rest, file)
                file.flush()
                os.fsync(file.fileno())
            if checksums:
                write_checksums(partial, found)
            opened.close()

        _first_does(finish, group)


def load_sharded(state: dict[str, Any], folder: Path) -> None:
    """Fill tensors, sharded over any number of ranks, from a folder that any number of ranks has written.

    Every rank must call it.

    Args:
        state: as it was saved; tensors are overwritten in place, other values replaced.
        folder: a folder that `save_sharded` or Lightning has written.

    Raises:
        CheckpointError: a file is missing or cut off, or asks for code, or a tensor is missing or has another
            shape.
    """
    reader = _Reader(folder)
    reader.read_metadata()  # report a broken folder before ranks communicate
    try:
        with _alone_or_not():
            dcp.load(state, storage_reader=reader, planner=_Planner())
    except CheckpointException as error:
        raise _plain(error, f"{folder} can't be loaded") from error


def load_rest(folder: Path) -> Any:
    """The unsharded rest, which rank 0 wrote."""
    check_rest(folder)
    rest = read_torch_file(folder / REST)
    if not isinstance(rest, dict):
        raise CheckpointError(
            f"{folder / REST} holds a {type(rest).__name__}, not a dict: load another checkpoint."
        )
    return rest


def check_rest(folder: Path) -> None:
    """Raise CheckpointError if the unsharded rest is missing or damaged."""
    if not (folder / REST).is_file():
        raise CheckpointError(f"{folder} has no {REST}: a part is missing. Copy the whole folder again.")
    check_file(folder, REST)


def gather(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Any]:
    """All shards of a folder as one nested state in host memory, read by a single process.

    Args:
        folder: a folder that `save_sharded` or Lightning has written.
        wanted: whether to read a top-level entry, by its name.
    """
    reader = _Reader(folder)
    contents = reader.read_metadata()
    paths = contents.planner_data or {name: (name,) for name in contents.state_dict_metadata}
    flat: dict[str, Any] = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        if isinstance(stored, TensorStorageMetadata)
        else None
        for name, stored in contents.state_dict_metadata.items()
        if wanted(str(paths[name][0]))
    }
    total = sum(value.nbytes for value in flat.values() if isinstance(value, Tensor))
    planner = _Gathering(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _alone_or_not(), ProgressBar(f"gathering {folder.name}", total, "bytes") as planner.bar:
            dcp.load(flat, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        raise _plain(error, f"{folder} can't be read") from error
    nested: dict[Any, Any] = {}
    for name, value in flat.items():
        _put(nested, paths[name], value)
    return _as_lists(nested)


class _Reader(CheckedReader):
    """torch's reader of a folder, without its unpickling."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The table of contents of a complete folder, made only of torch's own records."""
        metadata = read_contents(Path(self.path), CheckpointError)
        if not must_have_checksums(metadata):
            say_unchecked(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(dcp.DefaultLoadPlanner):
    """torch's planner, without its unpickling, and with mismatches reported in one line."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Compare what is requested with what is stored."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        stored = {} if metadata is None else metadata.state_dict_metadata
        missing = sorted(name for name in self.state_dict if name not in stored)
        if missing:
            some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            raise CheckpointError(
                f"it has no {some} ({len(missing)} missing): it is of another model or optimizer."
            )
        for name, value in self.state_dict.items():
            record = stored[name]
            if not isinstance(value, Tensor) or not isinstance(record, TensorStorageMetadata):
                continue
            if value.shape != record.size:
                raise CheckpointError(
                    f"{name} has shape {tuple(record.size)} in it and {tuple(value.shape)} here; build the module "
                    "with the options that it was saved with."
                )

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Load a value that is no tensor."""
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "")
            raise CheckpointError(
                f"its {name} is more than tensors and primitives and was not read: nothing of it was run ({reason})."
            ) from error
        if self.flatten_state_dict:
            _set(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


class _Gathering(_Planner):
    """Reports progress."""

    bar: ProgressBar

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        """Advance the progress bar by a tensor."""
        self.bar.advance(tensor.nbytes)


@contextmanager
def _alone_or_not() -> Iterator[None]:
    """Suppress torch's warning about a single process, which is a valid number of ranks."""
    if dist.is_initialized():  # leave warning filters alone: they are global, and this may be a thread
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _first_does(call: Callable[[], _Result], group: Any = None) -> _Result:
    """Call on rank 0 and broadcast the result; if it fails there, all ranks raise."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return call()
    outcome: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = call()
        except Exception as error:
            failure, outcome[1] = error, f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(outcome, src=0, group=group)
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        raise CheckpointError(f"Rank 0 could not write the checkpoint: {outcome[1]}")
    return outcome[0]


def _plain(error: CheckpointException, what: str) -> CheckpointError:
    """One line instead of the tracebacks of all ranks that torch reports."""
    rank, (cause, _) = next(iter(error.failures.items()))
    reason = str(cause) if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}"
    return CheckpointError(f"{what} (rank {rank}): {reason}")


def _set(state: Any, path: tuple[Any, ...], value: Any) -> None:
    for step in path[:-1]:
        state = state[step]
    state[path[-1]] = value


def _put(nested: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for step in path[:-1]:
        nested = nested.setdefault(step, {})
    nested[path[-1]] = value


def _as_lists(nested: Any) -> Any:
    """Lists instead of dicts whose keys count from 0: torch stores list positions as numbers in paths."""
    if not isinstance(nested, dict):
        return nested
    values = {key: _as_lists(value) for key, value in nested.items()}
    if values and all(type(key) is int for key in values) and sorted(values) == list(range(len(values))):
        return [values[number] for number in range(len(values))]
    return values

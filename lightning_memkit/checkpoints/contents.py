"""Read the table of contents of a torch.distributed.checkpoint folder without running code."""

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from lightning_memkit.checkpoints.atomic import CONTENTS
from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.checkpoints.folder_checksums import FILE as CHECKSUMS
from lightning_memkit.checkpoints.folder_checksums import check_file, must_have_checksums

_RECORDS = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
    "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(records.__name__, name): getattr(records, name) for name in _RECORDS},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
    # The path where a folder was written, as a pure path: that path and its system need not exist here.
    **{(home, "PosixPath"): PurePosixPath for home in ("pathlib", "pathlib._local")},
    **{(home, "WindowsPath"): PureWindowsPath for home in ("pathlib", "pathlib._local")},
}


def read_contents(folder: Path, error: type[ValueError]) -> Metadata:
    """The table of contents of a folder, made only of torch's own records; all tensors in it are complete.

    torch itself would unpickle the file, and so run any code in it.

    Args:
        folder: a folder of torch.distributed.checkpoint.
        error: the class of errors to raise.

    Raises:
        ValueError: of the class `error`: the file is missing, damaged or asks for code, or a file that it
            names is missing, cut off or outside the folder.
    """
    path = folder / CONTENTS
    if not path.is_file():
        raise error(f"{folder} has no {CONTENTS}: it is no sharded checkpoint, or a part of it is missing.")
    try:
        contents = _Records(io.BytesIO(path.read_bytes())).load()
        wrong = _wrong(contents)
        if not wrong and not check_file(folder, CONTENTS) and must_have_checksums(contents):
            wrong = f"says that there are checksums, and {CHECKSUMS} is missing"
    except _CodeError as refused:
        raise error(
            f"{path} names {refused}, which no table of contents needs and which could run code: the folder was "
            "refused and nothing was run. Load a checkpoint of your own."
        ) from None
    except CheckpointError as damage:
        raise error(str(damage)) from damage
    except Exception as damage:  # any kind, since a damaged pickle is a list of random instructions
        raise error(
            f"{path} is damaged and can't be read ({damage!r}); nothing was loaded: copy the whole folder again, or "
            "load another checkpoint."
        ) from damage
    if wrong:
        raise error(f"{path} {wrong}; nothing was loaded: copy the whole folder again.")
    _refuse_missing(folder, contents, error)
    return contents


def _wrong(contents: Any) -> str:
    """What is wrong with the table of contents; empty if nothing."""
    if not isinstance(contents, Metadata) or not isinstance(contents.storage_data, dict):
        return "is no table of contents of torch.distributed.checkpoint"
    places = contents.storage_data.values()
    if not all(
        isinstance(place.relative_path, str) and min(place.offset, place.length) >= 0 for place in places
    ):
        return "names no places in files"
    paths = contents.planner_data
    if paths is not None and not all(paths[name] for name in contents.state_dict_metadata):
        return "does not say where its values belong"
    for name, record in contents.state_dict_metadata.items():
        if not isinstance(record, (BytesStorageMetadata, TensorStorageMetadata)):
            return f"holds a {type(record).__name__} for {name}"
        lost = [index for index in _pieces(name, record) if index not in contents.storage_data]
        if lost:
            return f"does not say where {name} is"
        if isinstance(record, TensorStorageMetadata):
            if any(number < 0 for chunk in record.chunks for number in (*chunk.sizes, *chunk.offsets)):
                return f"has negative sizes for {name}"
            wide = next((chunk for chunk in record.chunks if _too_large(name, record, chunk, contents)), None)
            if wide is not None:
                return f"says that {name} has {tuple(wide.sizes)} values in fewer bytes than these take"
            stored = sum(math.prod(chunk.sizes) for chunk in record.chunks)
            if stored < math.prod(record.size):
                return f"lacks parts of {name}: it has {stored:,} of {math.prod(record.size):,} values"
    return ""


def _pieces(name: str, record: Any) -> Iterator[MetadataIndex]:
    if isinstance(record, TensorStorageMetadata):
        yield from (MetadataIndex(name, chunk.offsets) for chunk in record.chunks)
    else:
        yield MetadataIndex(name)


def _too_large(name: str, record: TensorStorageMetadata, chunk: Any, contents: Metadata) -> bool:
    """Whether a chunk claims more bytes than its file has; compressed chunks may."""
    place = contents.storage_data[MetadataIndex(name, chunk.offsets)]
    bytes_wanted = math.prod(chunk.sizes) * record.properties.dtype.itemsize
    return not getattr(place, "transform_descriptors", None) and bytes_wanted > place.length


def _refuse_missing(folder: Path, contents: Metadata, error: type[ValueError]) -> None:
    needed: dict[str, int] = {}
    for place in contents.storage_data.values():
        name = place.relative_path
        if Path(name).name != name or name == ".." or "\0" in name:
            raise error(f"{folder / CONTENTS} names {name!r}, outside the folder: it was refused.")
        needed[name] = max(place.offset + place.length, needed.get(name, 0))
    for name, size in sorted(needed.items()):
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found is None or found < size:
            state = "is missing" if found is None else f"is cut off: {found:,} of at least {size:,} bytes"
            raise error(
                f"{file} {state}; nothing was loaded. Copy the whole folder again, or load another checkpoint."
            )


class _CodeError(Exception):
    """The pickle names something that is none of torch's records."""


class _Records(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return torch's records and dtypes, which are loaded already; nothing is imported or looked up."""
        found = _ALLOWED.get((module, name))
        if found is None and module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            found = vars(torch)[name]
        if found is None:
            raise _CodeError(f"{module}.{name}")
        return found

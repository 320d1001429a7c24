"""What a folder says that it holds is read without its code, and only where all of it is there."""

import dataclasses
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint.metadata import Metadata

from lightning_memkit.checkpoints.contents import read_contents

STATE = {"weight": torch.arange(6.0).view(2, 3), "half": torch.ones(4, dtype=torch.bfloat16), "epoch": 3}


class OwnError(ValueError):
    pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**STATE}, checkpoint_id=tmp_path / "x", no_dist=True)
    return tmp_path / "x"


def rewrite(folder: Path, change: Callable[[Any], Any]) -> None:
    contents = pickle.loads((folder / ".metadata").read_bytes())
    changed = change(contents)
    (folder / ".metadata").write_bytes(pickle.dumps(contents if changed is None else changed))


def test_contents_are_those_that_torch_reads(folder: Path) -> None:
    ours, theirs = read_contents(folder, OwnError), dcp.FileSystemReader(folder).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data


@pytest.mark.parametrize(
    "name",
    [
        "torch.distributed.checkpoint.metadata.dataclass",  # imported by an allowed module
        "torch.distributed.checkpoint.metadata.Sequence",
        "torch.distributed.checkpoint.filesystem.FileSystemWriter",
        "torch.serialization.load",
        "torch.load",
        "pathlib.Path",
        "builtins.getattr",
        "os.system",
    ],
)
def test_other_names_are_refused_before_anything_runs(name: str, folder: Path) -> None:
    module, _, attribute = name.rpartition(".")
    (folder / ".metadata").write_bytes(f"c{module}\n{attribute}\n(tR.".encode())
    with pytest.raises(OwnError, match=rf"names {name}, which .* the folder was refused and nothing was run"):
        read_contents(folder, OwnError)


def test_a_name_within_a_name_is_refused(folder: Path) -> None:
    text = b"\x8c\x25torch.distributed.checkpoint.metadata\x8c\x11Metadata.__init__\x93."
    (folder / ".metadata").write_bytes(b"\x80\x04" + text)
    with pytest.raises(OwnError, match=r"names .*Metadata.__init__, which"):
        read_contents(folder, OwnError)


@pytest.mark.parametrize("outside", ["../x/a.distcp", "/a.distcp", "..", "inner/a.distcp"])
def test_files_elsewhere_are_refused(outside: str, folder: Path) -> None:
    def change(contents: Metadata) -> None:
        next(iter(contents.storage_data.values())).relative_path = outside  # pyright: ignore

    rewrite(folder, change)
    with pytest.raises(OwnError, match="outside the folder: it was refused"):
        read_contents(folder, OwnError)


def lose_a_place(contents: Metadata) -> None:
    places: Any = contents.storage_data
    del places[next(index for index in places if index.fqn == "weight")]


def lose_rows(contents: Metadata) -> None:
    record: Any = contents.state_dict_metadata["weight"]
    record.chunks[0] = records.ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([1, 3]))


def no_record(contents: Metadata) -> None:
    contents.state_dict_metadata["weight"] = 3  # pyright: ignore[reportArgumentType]


def before_the_file(contents: Metadata) -> None:
    places: Any = contents.storage_data
    index, place = next(iter(places.items()))
    places[index] = dataclasses.replace(place, offset=-1)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lose_a_place, "does not say where weight is"),
        (lose_rows, "lacks parts of weight: it has 3 of 6 values"),
        (no_record, "holds a int for weight"),
        (before_the_file, "names no places in files"),
        (lambda contents: [1], "is no table of contents"),
        (lambda contents: Metadata({}), "is no table of contents"),
        (lambda contents: Metadata({}, storage_data={1: 2}), "is damaged and can't be read"),
    ],
)
def test_contents_that_do_not_fit_together_are_refused(change: Any, match: str, folder: Path) -> None:
    rewrite(folder, change)
    with pytest.raises(OwnError, match=match):
        read_contents(folder, OwnError)


def test_any_cut_of_the_file_is_refused(folder: Path) -> None:
    whole = (folder / ".metadata").read_bytes()
    for length in range(0, len(whole), 7):
        (folder / ".metadata").write_bytes(whole[:length])
        with pytest.raises(OwnError, match="is damaged and can't be read|names|is no table"):
            read_contents(folder, OwnError)


def test_what_another_system_wrote_is_read(folder: Path) -> None:
    """Where a folder was written is a path of that system's class."""
    contents = dcp.FileSystemReader(folder).read_metadata()
    stream = io.BytesIO()
    contents.storage_meta = records.StorageMeta(checkpoint_id=Path("C"))
    pickle.dump(contents, stream, protocol=2)
    for home in (b"pathlib\nWindowsPath\n", b"pathlib._local\nPosixPath\n"):
        (folder / ".metadata").write_bytes(stream.getvalue().replace(b"pathlib\nPosixPath\n", home))
        assert str(read_contents(folder, OwnError).storage_meta.checkpoint_id) == "C"  # pyright: ignore

"""At no moment is there half a checkpoint, or none: kills, failures, leftovers."""

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memkit.checkpoints import atomic
from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.checkpoints.files import load, save
from lightning_memkit.checkpoints.sharded import gather, save_sharded
from lightning_memkit.checkpoints.writeback import StreamedFile

ROOT = Path(__file__).parents[2]
FAST = ["file", "folder", "trainer with a thread", "ranks with a thread"]
TRAINERS = ["trainer", "trainer with a thread", "ranks", "ranks with a thread"]
KINDS = ["file", "folder", "folder in two renames", *TRAINERS]


def kill(kind: str, folder: Path, kills: int) -> dict:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.checkpoints.killed",
        kind,
        str(folder),
        str(kills),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])  # gloo of torch 2.10 writes there, too


@pytest.mark.sampled(2)
@pytest.mark.skipif(sys.platform == "win32", reason="forks and kills")
@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        *[(kind, 2 if "ranks" in kind else 3) for kind in FAST],
        *[pytest.param(kind, 20 if "ranks" in kind else 30, marks=pytest.mark.slow) for kind in KINDS],
    ],
)
def test_a_kill_at_any_moment_leaves_the_last_good_checkpoint(kind: str, kills: int, tmp_path: Path) -> None:
    found = kill(kind, tmp_path, kills)
    assert found["left"] == ([] if kind in TRAINERS else ["last.ckpt"])
    if kills > 10:
        assert found["interrupted"] >= 2  # kills fell into the middle of saves


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch) -> None:
    save({"n": torch.ones(2)}, tmp_path / "last.ckpt")

    def fail(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save({"n": torch.zeros(2)}, tmp_path / "last.ckpt")
    monkeypatch.undo()
    assert torch.equal(load(tmp_path / "last.ckpt")["n"], torch.ones(2))
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.fixture
def small_files() -> Iterator[None]:
    """The system refuses to write more than 100 kB into a file."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


LARGE = {"n": torch.zeros(100_000)}
NO_ROOM: dict[str, Callable[[Path], object]] = {
    "file": lambda path: save(LARGE, path),
    "shards": lambda path: save_sharded(LARGE, {}, path),
    "beside the shards": lambda path: save_sharded({}, LARGE, path),
}


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("kind", NO_ROOM)
def test_a_checkpoint_for_which_there_is_no_room_leaves_the_old_one_and_says_why(
    kind: str, tmp_path: Path
) -> None:
    old = {"n": torch.ones(2)}
    path = tmp_path / "last.ckpt"
    save(old, path) if kind == "file" else save_sharded(old, {}, path)
    with pytest.raises(
        (atomic.FullDiskError, CheckpointError),
        match=r"last.ckpt could not be written: it is larger than a file may be .* free there.*older.*`ulimit -f`",
    ):
        NO_ROOM[kind](path)
    assert torch.equal((load(path) if kind == "file" else gather(path))["n"], old["n"])
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("kind", NO_ROOM)
def test_a_full_disk_is_said_with_its_room_and_the_remedy(kind: str, tmp_path: Path, monkeypatch) -> None:
    written = [0]

    def write(file: Any, data: Any) -> int:
        written[0] += len(data)
        if written[0] > 50_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return io.FileIO.write(file, data)

    monkeypatch.setattr(StreamedFile, "write", write)
    with pytest.raises(
        (atomic.FullDiskError, CheckpointError),
        match=r"last.ckpt could not be written: its file system is full; .* of .*room for both.*save_top_k",
    ):
        NO_ROOM[kind](tmp_path / "last.ckpt")
    assert not list(tmp_path.iterdir())


def test_what_another_process_is_writing_is_no_leftover(tmp_path: Path) -> None:
    with atomic.new_file(tmp_path / "one.ckpt") as file:
        file.write(b"half")
        save({}, tmp_path / "two.ckpt")
        assert len(list(tmp_path.iterdir())) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.ckpt", "two.ckpt"]
    assert (tmp_path / "one.ckpt").read_bytes() == b"half"


@pytest.mark.parametrize("exchange", [True, False])
def test_files_and_folders_take_each_others_place(exchange: bool, tmp_path: Path, monkeypatch) -> None:
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    path = tmp_path / "x.ckpt"
    for round_ in range(2):
        with atomic.new_folder(path) as folder:
            (folder / ".metadata").touch()
            (folder / "part").write_text(str(round_))
        assert (path / "part").read_text() == str(round_)
        save({"round": round_}, path)
        assert load(path) == {"round": round_}
        with atomic.new_folder(path) as folder:
            (folder / ".metadata").touch()
            (folder / "part").write_text("again")
    path.rename(tmp_path / "real.ckpt")
    path.symlink_to("real.ckpt")  # as ModelCheckpoint(save_last="link") leaves it
    with atomic.new_folder(path) as folder:
        (folder / "part").write_text("not through the link")
    assert (tmp_path / "real.ckpt" / "part").read_text() == "again"
    assert not path.is_symlink()
    atomic.remove(path)
    atomic.remove(path)
    assert [left.name for left in tmp_path.iterdir()] == ["real.ckpt"]


def test_a_folder_of_other_things_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("1")
    with pytest.raises(IsADirectoryError, match="holds other things than a checkpoint"):
        save({}, tmp_path / "thesis")
    with pytest.raises(IsADirectoryError), atomic.new_folder(tmp_path / "thesis"):
        pass
    assert (tmp_path / "thesis" / "chapter.txt").exists()

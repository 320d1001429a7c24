"""At no moment is there half a checkpoint, or none: kills, failures, leftovers."""

import errno
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memkit.checkpoints import atomic
from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.checkpoints.files import load, save
from lightning_memkit.checkpoints.sharded import gather, load_rest, save_sharded
from lightning_memkit.checkpoints.writeback import StreamedFile
from lightning_memkit.initialization.loading import load_weights
from lightning_memkit.utilities.atomic_write import staged
from tests.processes import run_module

ROOT = Path(__file__).parents[2]
FAST = ["file", "folder", "trainer with a thread", "ranks with a thread"]
TRAINERS = ["trainer", "trainer with a thread", "ranks", "ranks with a thread"]
KINDS = ["file", "folder", "folder in two renames", *TRAINERS]


def kill(kind: str, folder: Path, kills: int) -> dict:
    done = run_module("tests.checkpoints.killed", kind, str(folder), str(kills))
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
@pytest.mark.long
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


LONG = ["x" * 250 + ".ckpt", "ü" * 125 + ".ckpt"]


@pytest.mark.skipif(sys.platform == "win32", reason="names are limited otherwise")
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("exchange", [True, False])
def test_a_name_may_be_as_long_as_the_file_system_takes(
    name: str, exchange: bool, tmp_path: Path, monkeypatch
) -> None:
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    path = tmp_path / name
    left_over = staged(path, atomic.PARTIAL)  # of a killed save
    left_over.write_bytes(b"half")
    for round_ in range(2):
        save({"round": round_}, path)
        assert load(path) == {"round": round_}
        assert [file.name for file in tmp_path.iterdir()] == [name]
    path.unlink()
    for round_ in range(2):
        save_sharded({"w": torch.full((2,), float(round_))}, {}, path)
        assert gather(path)["w"].tolist() == [round_] * 2
        assert [file.name for file in tmp_path.iterdir()] == [name]
    atomic.remove(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="names are limited otherwise")
@pytest.mark.parametrize("name", ["short.ckpt", *LONG])
def test_a_replacement_that_was_interrupted_between_its_two_renames_is_undone(
    name: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    path, replace = tmp_path / name, Path.replace
    save_sharded({"w": torch.zeros(2)}, {}, path)

    def killed(self: Path, target: Path) -> Path:
        if self.name.endswith(atomic.PARTIAL):
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_sharded({"w": torch.ones(2)}, {}, path)
    assert not path.exists()
    monkeypatch.setattr(Path, "replace", replace)
    atomic.recover(path)
    assert gather(path)["w"].tolist() == [0, 0]
    save_sharded({"w": torch.ones(2)}, {}, path)
    assert [file.name for file in tmp_path.iterdir()] == [name]


@pytest.mark.skipif(sys.platform == "win32", reason="no such permissions")
def test_what_is_replaced_leaves_its_permissions_and_what_is_new_has_those_of_the_umask(
    tmp_path: Path,
) -> None:
    before = os.umask(0o027)
    try:
        file, folder = tmp_path / "a.ckpt", tmp_path / "shards"
        for _ in range(2):
            save({}, file)
            save_sharded({"w": torch.zeros(2)}, {}, folder)
            parts = [file, folder, folder / "meta.pt", folder / "__0_0.distcp"]
            seen = [oct(part.stat().st_mode & 0o777) for part in parts]
            wanted = [0o664, 0o775, 0o664, 0o604]
            for part, mode in zip(parts, wanted, strict=True):
                part.chmod(mode)
        assert seen == [oct(mode) for mode in wanted]
        save({}, tmp_path / "new.ckpt")
        assert (tmp_path / "new.ckpt").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_a_link_is_replaced_as_by_lightning_and_what_it_names_stays(tmp_path: Path) -> None:
    save({"epoch": 3}, tmp_path / "epoch=3.ckpt")
    last = tmp_path / "last.ckpt"
    last.symlink_to("epoch=3.ckpt")  # as ModelCheckpoint(save_last="link") leaves it
    save({"epoch": 4}, last)
    assert not last.is_symlink()
    assert [load(tmp_path / "epoch=3.ckpt"), load(last)] == [{"epoch": 3}, {"epoch": 4}]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems refuse such names")
def test_a_name_that_is_not_utf8_is_read_like_any_other(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    state = {"state_dict": {"w": torch.arange(3.0)}}
    for path, write in ((tmp_path / f"{name}.ckpt", save), (tmp_path / f"{name}.pt", torch.save)):
        write(state, path)
        assert torch.equal(load(path)["state_dict"]["w"], state["state_dict"]["w"])
        module = torch.nn.ParameterDict({"w": torch.zeros(3)})
        load_weights(module, path)
        assert torch.equal(module["w"], state["state_dict"]["w"])
    save_sharded({"w": torch.arange(3.0)}, {"a": 1}, tmp_path / name)
    assert gather(tmp_path / name)["w"].tolist() == [0, 1, 2]
    assert load_rest(tmp_path / name) == {"a": 1}

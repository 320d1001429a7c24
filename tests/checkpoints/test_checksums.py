"""Flipped and missing bytes are refused wherever they are, and what was written without checksums still loads."""

import io
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

from lightning_memkit.checkpoints import checksums, files
from lightning_memkit.checkpoints.checksums import CHUNK_BYTES, HashedWriter
from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.checkpoints.folder_checksums import FILE
from lightning_memkit.checkpoints.sharded import gather, load_rest, save_sharded
from tests.checkpoints.test_files import assert_same

FLIPS = 250
REMEDIES = ("copy", "Copy", "another checkpoint", "cut off", "of your own")
SHARES = {
    "state_dict": {f"layers.{number}.weight": torch.randn(9, 7) for number in range(4)},
    "optimizer_0": {"state": {"a": {"exp_avg": torch.randn(5), "step": torch.tensor(3.0)}}, "lr": 0.001},
}
REST = {"epoch": 3, "loops": {"fit": [1, 2, {"done": True}]}, "note": "x" * 200}


def write_file(folder: Path) -> None:
    files.save({**SHARES, **REST}, folder / "x.ckpt")


def read_file(folder: Path) -> Any:
    return files.load(folder / "x.ckpt")


def write_folder(folder: Path) -> None:
    save_sharded({**SHARES}, REST, folder)


def read_folder(folder: Path) -> Any:
    return {**gather(folder), **load_rest(folder)}


Kind = tuple[Callable[[Path], None], Callable[[Path], Any]]
KINDS = pytest.mark.parametrize(
    "kind", [(write_file, read_file), (write_folder, read_folder)], ids=["file", "folder"]
)


def assert_refused_or_equal(read: Callable[[Path], Any], folder: Path, path: Path, good: Any) -> None:
    message = ""
    try:
        assert_same(good, read(folder))
    except CheckpointError as refused:
        message = str(refused)
    assert not message or (str(path) in message and any(word in message for word in REMEDIES)), message


@KINDS
def test_a_flipped_byte_is_refused_wherever_it_is(kind: Kind, tmp_path: Path) -> None:
    write, read = kind
    folder = tmp_path / "x" if write is write_folder else tmp_path
    write(folder)
    good, dice = read(folder), random.Random(0)
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    for number in range(FLIPS):
        path = paths[number % len(paths)]
        content = path.read_bytes()
        place = dice.randrange(len(content))
        flipped = content[place] ^ dice.randrange(1, 256)
        path.write_bytes(content[:place] + bytes([flipped]) + content[place + 1 :])
        assert_refused_or_equal(read, folder, path, good)
        path.write_bytes(content)
    assert_same(good, read(folder))


@KINDS
def test_a_file_that_was_cut_off_is_refused(kind: Kind, tmp_path: Path) -> None:
    write, read = kind
    folder = tmp_path / "x" if write is write_folder else tmp_path
    write(folder)
    good, dice = read(folder), random.Random(1)
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        content = path.read_bytes()
        for length in (0, 1, len(content) - 1, *(dice.randrange(len(content)) for _ in range(20))):
            path.write_bytes(content[:length])
            assert_refused_or_equal(read, folder, path, good)
        path.write_bytes(content)


@pytest.mark.parametrize("place", [0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 5, -1], ids=str)
def test_each_of_several_chunks_is_compared(place: int, tmp_path: Path) -> None:
    values = torch.arange(2 * CHUNK_BYTES + 500, dtype=torch.uint8)
    files.save({"w": values}, tmp_path / "x.ckpt")
    assert torch.equal(files.load(tmp_path / "x.ckpt")["w"], values)
    content = bytearray((tmp_path / "x.ckpt").read_bytes())
    start = bytes(content).index(bytes(values[:300].numpy())) + place % len(values)
    content[start] ^= 1
    (tmp_path / "x.ckpt").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"by their checksum its bytes ([\d,]+) to ([\d,]+) are not"
    ) as refused:
        files.load(tmp_path / "x.ckpt")
    first, last = (int(word.replace(",", "")) for word in str(refused.value).split() if word[0].isdigit())
    assert first <= start < last <= first + CHUNK_BYTES + 4096  # the first chunk has the header, too


def test_a_flip_in_a_shard_of_many_chunks_is_refused(tmp_path: Path) -> None:
    save_sharded({"state_dict": {"w": torch.zeros(3 * CHUNK_BYTES, dtype=torch.uint8)}}, {}, tmp_path / "x")
    (shard,) = (tmp_path / "x").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[CHUNK_BYTES + 7] ^= 4
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{shard.name} is damaged .* 4,194,304 to 8,388,608"):
        gather(tmp_path / "x")


def test_files_of_before_still_load_and_it_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files.save({**SHARES}, tmp_path / "x.ckpt", checksums=False)
    save_sharded({**SHARES}, REST, tmp_path / "x", checksums=False)
    with caplog.at_level(logging.WARNING, checksums.__name__):
        for _ in range(3):
            assert_same(SHARES, files.load(tmp_path / "x.ckpt"))
            assert_same(SHARES, gather(tmp_path / "x"))
    said = [record.getMessage() for record in caplog.records if record.name == checksums.__name__]
    assert len(said) == 2
    assert all("flipped bytes" in line and "Save it again" in line for line in said)


def test_a_folder_that_lost_its_checksums_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "x")
    (tmp_path / "x" / FILE).unlink()
    with pytest.raises(CheckpointError, match=r"says that there are checksums, and .checksums is missing"):
        gather(tmp_path / "x")


def test_other_readers_read_what_has_checksums(tmp_path: Path) -> None:
    write_file(tmp_path)
    plain = load_file(tmp_path / "x.ckpt")
    assert all(torch.equal(plain[name], value) for name, value in SHARES["state_dict"].items())
    write_folder(tmp_path / "x")
    wanted: dict[str, Any] = {"state_dict": {name: torch.zeros(9, 7) for name in SHARES["state_dict"]}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        dcp.load(wanted, checkpoint_id=tmp_path / "x")
    assert_same(SHARES["state_dict"], wanted["state_dict"])


class Stingy(io.BytesIO):
    """Takes a few bytes at a time, as an unbuffered file may."""

    def write(self, data: Any, /) -> int:
        return super().write(bytes(data)[:1000])


def test_what_a_stream_takes_is_what_is_hashed() -> None:
    stream, data = Stingy(), random.Random(0).randbytes(10_000)
    writer = HashedWriter(stream, first=77)
    for start in range(0, len(data), 3333):
        assert writer.write(data[start : start + 3333]) == len(data[start : start + 3333])
    whole = HashedWriter(io.BytesIO(), first=77)
    whole.write(data)
    assert stream.getvalue() == data
    assert writer.checksums() == whole.checksums()

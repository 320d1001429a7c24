"""Files that somebody has made up: each is refused with CheckpointError, and nothing large is allocated."""

import json
import random
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memkit.checkpoints import files
from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.checkpoints.streamed import STRUCTURE
from tests.checkpoints.test_files import assert_same
from tests.spoiled import spoiled

STATE = {
    "state_dict": {"w": torch.arange(6.0).reshape(2, 3), "c": torch.ones(2, dtype=torch.complex64)},
    "lr": 0.001,
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "raw": b"abc",
    "keys": {1: (2, 3j)},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Without checksums: who makes a file up makes them fit, too."""
    files.save(STATE, tmp_path / "x.ckpt", checksums=False)
    return tmp_path / "x.ckpt"


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def put(path: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)


def refused(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as found:
        files.load(path)
    assert str(path) in str(found.value)
    return found.value


def message_of(path: Path) -> str:
    """Of the refusal; empty where the file loads."""
    try:
        files.load(path)
    except CheckpointError as error:
        return str(error)
    return ""


HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "huge shape": lambda header: header["w"].update(shape=[2**40, 2**40]),
    "huge offsets": lambda header: header["w"].update(data_offsets=[0, 2**62]),
    "negative offsets": lambda header: header["w"].update(data_offsets=[-8, 0]),
    "overlapping": lambda header: header["c"].update(data_offsets=header["w"]["data_offsets"]),
    "backwards": lambda header: header["w"].update(data_offsets=header["w"]["data_offsets"][::-1]),
    "wrong dtype": lambda header: header["w"].update(dtype="F99"),
    "narrow dtype": lambda header: header["w"].update(dtype="F16"),
    "no dtype": lambda header: header["w"].pop("dtype"),
    "text for a shape": lambda header: header["w"].update(shape="abc"),
    "a list for a tensor": lambda header: header.update(w=[1, 2]),
    "numbers in metadata": lambda header: header["__metadata__"].update(memkit=1),
    "no metadata": lambda header: header.pop("__metadata__"),
    "another version": lambda header: header["__metadata__"].update(memkit="99"),
    "a tensor for the structure": lambda header: header.update(
        {STRUCTURE: header["w"], "w": header[STRUCTURE]}
    ),
    "a path for a name": lambda header: header.update({"../../w": header.pop("w")}),
    "no tensors": lambda header: [header.pop(name) for name in list(header) if name != "__metadata__"],
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_lie_are_refused(name: str, path: Path) -> None:
    header, data = parts(path)
    HEADERS[name](header)
    put(path, json.dumps(header).encode(), data)
    refused(path)


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":' * 100_000,
        b"{" + b'"a":[' * 50_000,
        b'{"\xff\xfe": 1}',
        b"{}",
        b'{"a": 1' + b"9" * 5000 + b"}",
        b"{[]}",
    ],
    ids=["objects in objects", "lists in lists", "no utf-8", "empty", "a long number", "no json"],
)
def test_headers_that_are_no_json_of_ours_are_refused(text: bytes, path: Path) -> None:
    put(path, text, parts(path)[1])
    refused(path)


@pytest.mark.parametrize("length", [0, 1, 99_999_999, 2**31, 2**63, 2**64 - 1])
def test_a_declared_length_allocates_nothing(length: int, path: Path) -> None:
    header, data = parts(path)
    put(path, json.dumps(header).encode(), data, length)
    tracemalloc.start()
    try:
        refused(path)
        assert tracemalloc.get_traced_memory()[1] < 4 * 1024**2
    finally:
        tracemalloc.stop()


def test_a_name_twice_is_refused(path: Path) -> None:
    header, data = parts(path)
    text = json.dumps(header).replace('"c":', '"w":')
    put(path, text.encode(), data)
    assert "twice" in str(refused(path))


STRUCTURES: dict[str, Any] = {
    "unknown kind": {"function": "os.system"},
    "no such tensor": {"tensor": "nowhere"},
    "a tensor of no name": {"tensor": None},
    "no float": {"float": "abc"},
    "no complex": {"complex": "1+"},
    "no base64": {"bytes": "a"},
    "no dtype": {"dtype": "load"},
    "no device": {"device": "moon"},
    "an unhashable key": {"dict": [[[1], 2]]},
    "no pairs": {"dict": [1, 2]},
    "an unhashable set": {"set": [[1]]},
    "a size of text": {"Size": ["a"]},
    "no counter": {"Counter": 3},
    "versions that are none": {"dict": {}, "versions": {"float": "x"}},
    "a wrapper of no class": {"wrapper": 3},
    "a wrapper of a class that is not registered": {"wrapper": "os.system", "inner": {}},
    "a wrapper without content": {"wrapper": "torch.nn.parameter.Parameter"},
}


def put_structure(path: Path, content: bytes) -> None:
    header, data = parts(path)
    start, end = header[STRUCTURE]["data_offsets"]
    assert end == len(data)
    header[STRUCTURE].update(shape=[len(content)], data_offsets=[start, start + len(content)])
    put(path, json.dumps(header).encode(), data[:start] + content)


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_that_mean_nothing_are_refused(name: str, path: Path) -> None:
    put_structure(path, json.dumps({"state": {"dict": {"x": STRUCTURES[name]}}, "as_bytes": {}}).encode())
    refused(path)


@pytest.mark.parametrize(
    "content",
    [
        b'{"state":' + b"[" * 20_000 + b"]" * 20_000 + b',"as_bytes":{}}',
        b'{"state":' + b"[" * 200_000,
        b'{"state":1,"state":2,"as_bytes":{}}',
        b'{"state":{"tensor":"w"},"as_bytes":{"w":["float64",[99999999999]]}}',
        b'{"state":{"tensor":"w"},"as_bytes":{"w":["load",[1]]}}',
        b'{"state":{"tensor":"w"},"as_bytes":{"w":3}}',
        b'{"state":1}', b"[]", b"3", b"", b"\xff\xfe", b"null",
    ],
)  # fmt: skip
def test_documents_that_are_none_are_refused(content: bytes, path: Path) -> None:
    put_structure(path, content)
    assert refused(path).__cause__ is not None


def test_any_change_of_a_made_up_file_is_refused_or_loads(path: Path) -> None:
    """Nothing else is ever raised."""
    good, dice = path.read_bytes(), random.Random(3)
    for _ in range(400):
        path.write_bytes(spoiled(good, dice))
        message = message_of(path)
        assert not message or str(path) in message
    path.write_bytes(good)
    assert_same(STATE, files.load(path))


@pytest.mark.parametrize("seed", range(3))
def test_any_change_of_a_file_of_torch_is_refused_or_loads(seed: int, tmp_path: Path) -> None:
    path, dice = tmp_path / "x.ckpt", random.Random(seed)
    torch.save(STATE, path, _use_new_zipfile_serialization=seed != 1)
    good = path.read_bytes()
    for _ in range(100):
        content = bytearray(good)
        for _ in range(dice.choice((1, 4))):
            content[dice.randrange(len(content))] = dice.randrange(256)
        path.write_bytes(content[: dice.randrange(len(content))] if dice.random() < 0.2 else content)
        message = message_of(path)
        assert not message or str(path) in message


def test_an_archive_that_unpacks_to_more_than_it_holds_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(10**7))
    tracemalloc.start()
    try:
        assert "would take 10,000,000 bytes" in str(refused(path).__cause__)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()

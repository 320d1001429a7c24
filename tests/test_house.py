"""The package's rooms: their order, no import upward or in a circle; short files and signatures, names used once."""

import re
from pathlib import Path

import pytest

import lightning_memkit
from benchmarks.house import ORDER, House
from benchmarks.house_picture import PICTURE, picture

PACKAGE = Path(lightning_memkit.__file__).parent


@pytest.fixture(scope="module")
def house() -> House:
    return House(PACKAGE)


def test_every_room_has_its_place_in_the_order(house: House) -> None:
    assert {*house.rooms, *house.loose, "cli"} == {*ORDER}


def test_no_import_goes_upward(house: House) -> None:
    assert house.upward == []


def test_no_import_goes_round(house: House) -> None:
    assert house.circles == []


def test_every_file_lies_in_a_room(house: House) -> None:
    assert house.loose == []


def test_the_picture_of_the_rooms_is_that_of_the_code(house: House) -> None:
    drawn = PICTURE.read_text(encoding="utf-8")
    assert drawn == picture(house), "draw it anew: python -m benchmarks.house_picture"
    page = (PICTURE.parents[1] / "architecture.md").read_text(encoding="utf-8")
    assert f"]({PICTURE.parent.name}/{PICTURE.name})" in page


def test_the_picture_leaves_out_what_other_arrows_imply(tmp_path: Path) -> None:
    house = package(
        tmp_path,
        optim__high="from planted.memory import low\nfrom planted.utilities import lowest\n",
        memory__low="from planted.utilities import lowest\n",
        utilities__lowest="",
    )
    arrows = re.findall("<title>(.*?)</title>", picture(house))
    assert arrows == ["optim imports memory", "memory imports utilities"]


# Others call these: transformers' attention, an autograd function's forward, torch's cross_entropy.
GIVEN_SIGNATURES = {
    "attention.hugging_face._attention",
    "loss.head_function.LinearCrossEntropy.forward",
    "loss.lazy_logits._loss",
    "prediction.persona_attention.AttentionChoice.__call__",
}


def test_a_file_is_short_unless_it_holds_kernels(house: House) -> None:
    assert [name for name, _ in house.long_files if not name.endswith(".kernels")] == []


def test_a_class_name_means_one_thing(house: House) -> None:
    assert house.names_twice == {}


def test_a_function_takes_few_parameters_unless_others_call_it(house: House) -> None:
    found = {name.removeprefix("lightning_memkit.") for name, _ in house.long_signatures}
    assert found == GIVEN_SIGNATURES


def package(folder: Path, **files: str) -> House:
    root = folder / "planted"
    for name, text in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    return House(root)


def test_an_import_upward_within_a_function_is_seen(tmp_path: Path) -> None:
    house = package(
        tmp_path,
        memory__low="def f():\n    from planted.optim.high import x\n    return x\n",
        optim__high="x = 1\n",
    )
    assert house.upward == [("planted.memory.low", "planted.optim.high")]
    assert house.deferred == house.upward


def test_a_circle_that_a_deferred_import_closes_is_seen(tmp_path: Path) -> None:
    house = package(
        tmp_path,
        optim__one="from planted.optim import two\n",
        optim__two="def f():\n    from planted.optim.one import two\n",
    )
    assert house.circles == [["planted.optim.one", "planted.optim.two"]]


def test_an_import_for_types_alone_is_seen(tmp_path: Path) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from planted.optim.high import x\n"
    house = package(tmp_path, memory__low=text, optim__high="x = 1\n")
    assert house.upward == [("planted.memory.low", "planted.optim.high")]


def test_names_and_signatures_are_counted(tmp_path: Path) -> None:
    house = package(
        tmp_path,
        optim__one="class Part: ...\ndef f(a, b, c, d, e, f, g): ...\n",
        memory__two="class _Part: ...\nclass Other: ...\ndef f(self, a, b, c, d, e, f): ...\n",
    )
    assert house.names_twice == {"Part": ["planted.memory.two", "planted.optim.one"]}
    assert house.long_signatures == [("planted.optim.one.f", 7)]

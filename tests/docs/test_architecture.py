"""The page on the architecture names files, and what is in them, as they are."""

import re
from pathlib import Path

import pytest

import lightning_memkit

PACKAGE = Path(lightning_memkit.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`((?:[\w.*-]+/)+[\w.*-]*)`", PAGE)))
WITHIN = sorted(set(re.findall(r"`([\w/]+\.py)`\s+\(`([\w.]+)`\)", PAGE)))
JOURNEYS = PAGE.partition("## Five journeys")[2].partition("\n## ")[0].split("\n### ")[1:]


def files(path: str) -> list[Path]:
    """A file, or those of a pattern, in the package or beside it."""
    return [found for folder in (PACKAGE, PACKAGE.parent) for found in folder.glob(path)]


def defines(path: str, name: str) -> bool:
    """Whether a file has a class, function, or constant of that name; of `Class.method` both."""
    (file,) = files(path)
    text = file.read_text(encoding="utf-8")
    return all(
        re.search(rf"^ *(?:async def|def|class) {part}\b|^{part}\b.* = ", text, re.MULTILINE)
        for part in name.split(".")
    )


@pytest.mark.parametrize("path", NAMED)
def test_a_file_that_the_page_names_exists(path: str) -> None:
    assert files(path)


@pytest.mark.parametrize(("path", "name"), WITHIN)
def test_what_the_page_finds_in_a_file_is_there(path: str, name: str) -> None:
    assert defines(path, name)


def test_files_are_named_and_one_that_is_gone_is_noticed() -> None:
    assert len(NAMED) > 60
    assert len(WITHIN) > 40
    assert not files("plugins/_seam.py")
    assert not defines("optim/open_step.py", "OpenStep.vanish")


def test_there_are_five_journeys_of_about_ten_steps() -> None:
    steps = [len(re.findall(r"^\d+\. ", journey, re.MULTILINE)) for journey in JOURNEYS]
    assert len(steps) == 5
    assert all(8 <= count <= 10 for count in steps), steps

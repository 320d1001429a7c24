"""The guide's table of cards is what its own code prints."""

import re
from pathlib import Path

import pytest

from tests.docs.test_pages import as_script

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide.md"


def test_the_table_of_cards_is_the_printed_one(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(as_script(PAGE), str(PAGE), "exec"), {"__name__": "guide"})
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(printed) == 9
    assert "\n".join(printed) in PAGE.read_text(encoding="utf-8")


def test_examples_that_pages_name_exist() -> None:
    folder = PAGE.parent.parent
    for page in ("guide.md", "first-hour.md", "from-hugging-face.md"):
        text = (PAGE.parent / page).read_text(encoding="utf-8")
        for name in re.findall(r"`(examples/\w+)`", text):
            assert (folder / name).is_dir(), name

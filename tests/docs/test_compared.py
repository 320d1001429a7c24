"""The page that compares: what a peer does has a source, and what memkit does a test or benchmark."""

import re
from pathlib import Path

import lightning_memkit
from benchmarks.__main__ import find_benchmarks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compared.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
MARKS = {"yes": "✓", "partly": "part", "no": "no", "–": "–"}


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a page: rows of cells, without the heads."""
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    ]


def sources(text: str) -> dict[str, str]:
    return dict(re.findall(r"^\[([a-z]+-\d+)\]: (https://\S+)$", text, re.MULTILINE))


TABLE, SHOWN, VERSIONS = tables(PAGE)


def test_every_cell_of_a_peer_has_a_source() -> None:
    defined = sources(PAGE)
    assert len(TABLE) == 16
    for row in TABLE:
        for cell in row[2:]:
            (label,) = re.findall(r"^\[(?:yes|partly|no|–)\]\[([a-z]+-\d+)\]", cell)
            assert label in defined, cell


def test_what_is_ours_is_shown_by_what_is_there() -> None:
    assert [row[0] for row in SHOWN] == [row[0] for row in TABLE]
    for what, by in SHOWN:
        paths = re.findall(r"`(tests/[\w/]+\.py)`", by)
        names = re.findall(r"`python -m benchmarks (\w+)`", by)
        assert paths + names, what
        assert all((ROOT / path).is_file() for path in paths)
        assert set(names) <= set(find_benchmarks())


def test_the_readme_has_the_same_marks_and_sources() -> None:
    (ours,) = [table for table in tables(README) if len(table[0]) == len(TABLE[0])]
    version, *rows = ours
    assert version[1] == lightning_memkit.__version__
    for row, full in zip(rows, TABLE, strict=True):
        cells = [re.findall(r"^\[(yes|partly|no|–)\](\[[a-z]+-\d+\])", cell)[0] for cell in full[2:]]
        assert [row[0], *row[2:]] == [full[0], *(f"[{MARKS[mark]}]{source}" for mark, source in cells)]
        assert ("on CPU" in row[1]) == ("†" in full[1]), row[0]
    assert sources(README) == sources(PAGE)

"""The page that compares: what a peer does has a source, and what memkit does a test or benchmark."""

import re
from pathlib import Path

from benchmarks.__main__ import find_benchmarks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compared.md").read_text(encoding="utf-8")
TABLE, SHOWN = (
    [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)[:2]
)


def test_every_cell_of_a_peer_has_a_source() -> None:
    defined = dict(re.findall(r"^\[([a-z]+-\d+)\]: (https://\S+)$", PAGE, re.MULTILINE))
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

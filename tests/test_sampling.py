"""Which tests a run takes: every long one in one of four commits' runs, and rows of a sweep spread over it."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.sampling import TURNS, leave_out, turn_of


class Item(SimpleNamespace):
    """What the sample asks of a pytest.Item."""

    nodeid: str
    marks: dict[str, pytest.Mark]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        self.marks[marker.name] = marker.mark


def items(count: int, *marks: pytest.MarkDecorator) -> list[Any]:
    return [
        Item(nodeid=f"tests/test_a.py::test_b[{row}]", marks={mark.name: mark.mark for mark in marks})
        for row in range(count)
    ]


def kept(made: list[Any], turn: int = 0) -> set[str]:
    leave_out(cast("list[pytest.Item]", made), turn)
    return {item.nodeid for item in made if "slow" not in item.marks}


def test_every_long_test_runs_in_one_turn() -> None:
    turns = [kept(items(100, pytest.mark.long), turn) for turn in range(TURNS)]
    assert all(10 < len(turn) < 40 for turn in turns)
    assert sum(map(len, turns)) == len(set.union(*turns)) == 100


def test_what_no_mark_names_always_runs() -> None:
    assert all(len(kept(items(10), turn)) == 10 for turn in range(TURNS))


@pytest.mark.parametrize("others", [2, 3, 4])
def test_a_sample_falls_in_step_with_no_parameter(others: int) -> None:
    rows = kept(items(60, pytest.mark.sampled(6)))
    numbers = {int(row.partition("[")[2][:-1]) % others for row in rows}
    assert 8 <= len(rows) <= 12
    assert numbers == set(range(others))


def test_where_no_commit_can_be_read_it_is_the_first_turn(tmp_path: Path) -> None:
    assert turn_of(tmp_path) == 0


@pytest.mark.usefixtures("at_root")
def test_a_test_that_is_named_runs_in_every_turn() -> None:
    named = "tests/plugins/test_two_ranks_tuning.py::"
    named += "test_ranks_agree_on_the_size_that_is_fastest_for_the_slower_of_them"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", named]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert named in done.stdout.splitlines()

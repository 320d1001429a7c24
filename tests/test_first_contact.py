"""The benchmark of what a new user meets: what it takes for a good message, and for a line that is ours."""

from dataclasses import replace

import pytest

from benchmarks._contact_messages import Told, changed, told
from benchmarks._contact_mistakes import JOB, MISTAKES, Mistake, callbacks, one
from benchmarks._contact_projects import PROJECTS, kind_of, ours

BUDGET = Mistake("a budget in words", ("lots", "GiB"), changes=callbacks(one("MemoryBudget", budget="lots")))
GOOD = Told(code=2, message="memkit: error: budget='lots': write 24GiB", lines=1, left=[], stepped=False)


@pytest.mark.parametrize(
    ("told_so", "lack"),
    [
        (GOOD, []),
        (replace(GOOD, message="memkit: error: no"), ["does not name 'lots'", "does not name 'GiB'"]),
        (replace(GOOD, code=0), ["is no error"]),
        (replace(GOOD, lines=4), ["takes 4 lines"]),
        (replace(GOOD, stepped=True), ["comes after a step"]),
        (replace(GOOD, left=["half.ckpt"]), ["leaves half.ckpt"]),
    ],
)
def test_what_a_message_lacks(told_so: Told, lack: list[str]) -> None:
    assert told_so.lacks(BUDGET) == lack


def test_a_mistake_is_made_and_a_run_without_one_is_told() -> None:
    refused, trained = told([BUDGET, Mistake("none", ())])
    assert refused.lacks(BUDGET) == []
    assert trained.lacks(Mistake("none", ())) == ["is no error", "comes after a step"]


def test_mistakes_are_forty_at_least_and_each_is_another() -> None:
    assert len({mistake.what for mistake in MISTAKES}) == len(MISTAKES) >= 40
    assert all(len(mistake.names) >= 2 for mistake in MISTAKES)


def test_a_change_leaves_the_config_as_it_was() -> None:
    assert changed(JOB, {"trainer.max_steps": 9, "new.key": 1})["trainer"]["max_steps"] == 9
    assert JOB["trainer"]["max_steps"] == 2
    assert "new" not in JOB


def test_projects_change_few_lines() -> None:
    assert [project.lines_changed for project in PROJECTS] == [2, 3, 3]


def test_lines_that_differ_by_numbers_are_not_ours() -> None:
    added = ours(["peak 3.2", "a"], ["peak 7", "a", "MemoryBudget: micro-batch 4"])
    assert added == ["MemoryBudget: micro-batch 4"]
    assert kind_of(added[0]) == "the budget"
    assert kind_of("Whatever else") is None
    assert kind_of("  indented") is None

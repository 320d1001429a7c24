"""A sweep of hours that was stopped goes on where it was: of the same code, and of no other."""

import subprocess
from pathlib import Path

import pytest

from benchmarks import fault_sweep, record
from benchmarks._fault_ranks import Job, Shared
from benchmarks._fault_runs import Case, Tally
from benchmarks._finished import FinishedCells


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one file, which a sweep depends on."""
    root = tmp_path / "code"
    root.mkdir()
    (root / "swept.py").write_text("first")
    monkeypatch.setattr(record, "ROOT", root)
    git(root, "init", "-q")
    commit(root)
    return root


def git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=root, check=True)


def commit(root: Path) -> None:
    git(root, "add", ".")
    git(root, "commit", "-qm", "next")


def test_what_has_ended_is_found_again_until_the_sweep_ends(code: Path, tmp_path: Path) -> None:
    first = FinishedCells("sweep", ["swept.py"], tmp_path / "cells")
    first.add("a", {"points": 3})
    first.add("b", {"points": 4})
    (code / "beside.py").write_text("not swept")
    commit(code)
    second = FinishedCells("sweep", ["swept.py"], tmp_path / "cells")
    assert second.found == {"a": {"points": 3}, "b": {"points": 4}}
    second.forget()
    assert FinishedCells("sweep", ["swept.py"], tmp_path / "cells").found == {}


def test_a_line_that_a_kill_cut_off_is_left_out(code: Path, tmp_path: Path) -> None:
    FinishedCells("sweep", ["swept.py"], tmp_path / "cells").add("a", 1)
    (path,) = (tmp_path / "cells").iterdir()
    with path.open("a") as file:
        file.write('["b", {"poi')
    again = FinishedCells("sweep", ["swept.py"], tmp_path / "cells")
    assert again.found == {"a": 1}
    again.add("c", 3)
    assert FinishedCells("sweep", ["swept.py"], tmp_path / "cells").found == {"a": 1, "c": 3}


def test_cells_of_other_code_are_not_taken(code: Path, tmp_path: Path) -> None:
    FinishedCells("sweep", ["swept.py"], tmp_path / "cells").add("a", 1)
    (code / "swept.py").write_text("second")
    changed = FinishedCells("sweep", ["swept.py"], tmp_path / "cells")
    assert changed.found == {}
    changed.add("b", 2)
    commit(code)
    assert FinishedCells("sweep", ["swept.py"], tmp_path / "cells").found == {}


def test_cells_of_other_versions_are_not_taken(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FinishedCells("sweep", ["swept.py"], tmp_path / "cells").add("a", 1)
    monkeypatch.setattr("benchmarks._finished.installed_versions", lambda: {"torch": "3.0"})
    assert FinishedCells("sweep", ["swept.py"], tmp_path / "cells").found == {}


def test_the_fault_sweep_runs_only_what_has_not_ended(code: Path, tmp_path: Path) -> None:
    ended = Case(model="transformer", optimizer="fused")
    kept = FinishedCells("sweep", ["swept.py"], tmp_path / "cells")
    kept.add(str(ended), {"points": 7, "equal": 6, "failures": ["3 aten.mm: differs"], "total_points": 7})
    again = FinishedCells("sweep", ["swept.py"], tmp_path / "cells")
    other = Case(model="transformer", optimizer="fused", step=1, naive=True)
    known, ran = fault_sweep.run_cases([ended, other], fault_sweep.Sample(naive=1), 0, again)
    assert known == Tally(points=7, equal=6, failures=["3 aten.mm: differs"], total_points=7)
    assert ran.points == 1
    assert list(FinishedCells("sweep", ["swept.py"], tmp_path / "cells").found) == [str(ended), str(other)]


def test_the_fault_sweep_runs_only_the_ranks_that_have_not_ended(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def run_ranks(job: Job) -> Shared:
        ran.extend(job.cases)
        return Shared(job=job, tallies=[Tally(points=2, equal=1, failures=["1 aten.mm: x"])], hangs=[1])

    monkeypatch.setattr(fault_sweep, "run_ranks", run_ranks)
    first, second = fault_sweep.rank_cases(None)[:2]
    kept = FinishedCells("sweep", ["swept.py"], tmp_path / "cells")
    (before,) = fault_sweep.run_rank_cases([first], fault_sweep.Sample(), 0, kept)
    again = FinishedCells("sweep", ["swept.py"], tmp_path / "cells")
    known, other = fault_sweep.run_rank_cases([first, second], fault_sweep.Sample(), 0, again)
    assert ran == [first, second]
    assert (known.tallies, known.hangs, known.rows()) == (before.tallies, [1], before.rows())
    assert other.job.cases == [second]


def test_the_fault_sweep_names_code_that_is_there() -> None:
    assert all((Path(record.ROOT) / path).exists() for path in fault_sweep.CODE)

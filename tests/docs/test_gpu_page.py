"""The page on GPUs: what a card has shown is made from the results, and "not yet" until there are some."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import hooks

    yield hooks
    del sys.modules["hooks"]


def rows(table: str) -> dict[str, str]:
    """The last column by the first."""
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells[-1] for cells in lines}


def test_nothing_is_verified_without_results(hooks, tmp_path: Path) -> None:
    found = rows(hooks.verified_on_a_card(tmp_path))
    assert set(found.values()) == {"not yet"}
    assert {*hooks.STAGES, "optimizer_step", "prediction"} <= set(found)


def test_the_stages_are_those_of_the_script(hooks) -> None:
    script = (ROOT / "scripts" / "first_card.sh").read_text()
    line = next(line for line in script.splitlines() if line.startswith("STAGES="))
    assert line.removeprefix("STAGES=").strip('"').split() == list(hooks.STAGES)


def test_a_row_tells_when_on_what_and_at_which_commit(hooks, tmp_path: Path) -> None:
    note = {
        "stage": "facts",
        "date": "2027-01-02",
        "card": "H200",
        "torch": "2.11",
        "commit": "0123456789abcdef",
    }
    earlier = {**note, "date": "2027-01-01", "status": "failed with exit code 1"}
    elsewhere = {**note, "stage": "imports", "card": "none", "status": "passed"}
    lines = [earlier, {**note, "status": "passed"}, elsewhere]
    (tmp_path / "stages.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    content = {
        "name": "prediction", "quick": False, "hardware": {"gpu": "H200"}, "date": "2027-01-03",
        "versions": {"torch": "2.11"}, "commit": "fedcba9876543210",
    }  # fmt: skip
    (tmp_path / "prediction-h200.json").write_text(json.dumps(content))
    on_cpu = {**content, "name": "attention", "hardware": {"gpu": None}}
    (tmp_path / "attention-cpu.json").write_text(json.dumps(on_cpu))
    found = rows(hooks.verified_on_a_card(tmp_path))
    assert found["facts"] == "passed on 2027-01-02, H200, torch 2.11, `0123456789`"
    assert found["imports"] == found["attention"] == "not yet"
    assert found["prediction"] == "2027-01-03, H200, torch 2.11, `fedcba9876`"
    results = [
        {"result": said} for said in ("ok", "ok", "limit missed: 2 > 1", "failed: ValueError", "no time: 3 s")
    ]
    quick = {**content, "name": "loss_head", "quick": True, "rows": results}
    (tmp_path / "loss_head-h200.json").write_text(json.dumps(quick))
    later = {**content, "quick": True, "date": "2027-01-04"}
    (tmp_path / "prediction-quick-h200.json").write_text(json.dumps(later))
    found = rows(hooks.verified_on_a_card(tmp_path))
    assert (
        found["prediction"] == "2027-01-03, H200, torch 2.11, `fedcba9876`"
    )  # the full run before a quick one
    assert found["loss_head"] == "2027-01-03 (quick), H200, torch 2.11, `fedcba9876`, 2 of 4 rows passed"

"""The matrix of models and plugins: cells of the committed table, trained anew, and how cells are judged."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import matrix
from benchmarks._matrix_columns import COLUMNS, Column, cells
from benchmarks._matrix_models import SAMPLES, STEPS, halves, models, rows_of
from benchmarks.harness import Options, threads
from benchmarks.matrix import FAILED, NO_CELL, PASSED, REFUSED, judged, report_of, run, update_error

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
# Equal to the bit, up to rounding, in another precision, told something, and refused for two reasons.
SAMPLE = [
    ("LlamaForCausalLM", "ActivationCheckpointing"),
    ("BertForMaskedLM", "MemoryBudget"),
    ("MLP", "PureBF16Precision"),
    ("BoringModel", "ActivationCheckpointing"),
    ("MambaForCausalLM", "PackedDataModule"),
    ("LightningLSTM", "MemoryBudget"),
]


def committed() -> dict[tuple[str, str], tuple[str, str]]:
    """By cell: what the committed table shows, and the sentence under its number."""
    (path,) = (path for path in RESULTS.glob("matrix-*.json") if "quick" not in path.name)
    content = json.loads(path.read_text(encoding="utf-8"))
    said = [note.partition(": ")[2] for note in content["notes"]]
    shown = {}
    for row in content["rows"]:
        for column in COLUMNS:
            verdict, _, number = row[column.name].partition(" ")
            shown[row["model"], column.name] = (verdict, said[int(number) - 1] if number else "")
    return shown


def _without_figures(text: str) -> str:
    """How far off something is depends on a processor's rounding."""
    return re.sub(r"[\d.]+ ?%", "some", text)


def test_a_sample_comes_to_what_the_table_shows_and_raises_the_lines_that_it_gives() -> None:
    shown = committed()
    found = {cell: (verdict, _without_figures(text)) for cell, (verdict, text) in judged(SAMPLE).items()}
    assert found == {cell: (shown[cell][0], _without_figures(shown[cell][1])) for cell in SAMPLE}
    assert {shown[cell][0] for cell in SAMPLE} == {PASSED, REFUSED}


def test_the_table_has_every_cell_and_no_failure() -> None:
    shown = committed()
    assert {cell for cell, (verdict, _) in shown.items() if verdict != NO_CELL} >= set(cells())
    assert FAILED not in {verdict for verdict, _ in shown.values()}
    assert all(text for verdict, text in shown.values() if verdict == REFUSED)


@pytest.mark.slow
def test_a_seeded_sample_of_all_places_passes() -> None:
    report = run(Options(quick=True, seed=1))
    assert report.figures["cells"] >= 60
    assert report.figures["failed"] == 0, report.rows


def test_weights_that_plain_lightning_does_not_reach_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that is compared with the wrong batches: the judgement isn't there to agree."""
    (column,) = (column for column in COLUMNS if column.name == "MemoryReport")
    monkeypatch.setattr(Column, "compared_for", lambda self, model: "halves")
    verdict, text = judged([("LlamaForCausalLM", column.name)])["LlamaForCausalLM", column.name]
    assert verdict == FAILED
    assert text.startswith("weights are off by")


def test_an_update_error_is_a_share_of_the_update() -> None:
    before, plain = {"a": torch.zeros(4)}, {"a": torch.ones(4)}
    assert update_error({"a": torch.full((4,), 1.5)}, plain, before) == 0.5
    assert update_error(before, before, before) == float("inf")  # nothing was trained
    assert update_error({"b": torch.ones(4)}, plain, before) == float("inf")


def test_what_was_said_is_numbered_once() -> None:
    verdicts = {
        ("A", "MemoryReport"): (PASSED, ""),
        ("A", "ChunkedLoss"): (REFUSED, "ValueError: no head"),
        ("B", "ChunkedLoss"): (REFUSED, "ValueError: no head"),
    }
    report = report_of(verdicts)
    assert [row["ChunkedLoss"] for row in report.rows] == ["no 1", "no 1"]
    assert report.notes == ("1: ValueError: no head",)
    assert report.figures == {"cells": 3, "passed": 1, "refused": 2, "failed": 0}
    assert not report.failed


def test_a_cell_that_failed_fails_the_command() -> None:
    verdicts = {("A", "MemoryReport"): (FAILED, "weights are off"), ("A", "ChunkedLoss"): (PASSED, "")}
    assert report_of(verdicts).failed


def test_plain_runs_and_cells_use_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []

    def seen(wanted: Any) -> dict[Any, Any]:
        used.append(torch.get_num_threads())
        return {}

    monkeypatch.setattr(matrix, "judged", seen)
    with threads(2):
        run(Options(quick=True, seed=0))
    assert used == [1]


def test_batches_of_every_model_have_samples_for_two_ranks_and_no_dropout() -> None:
    for model in models():
        batches = model.batches()
        assert len(batches) == STEPS
        rows = rows_of(batches[0])
        assert rows % SAMPLES == 0, model.name
        assert [rows_of(half) for half in halves(batches[0])] == [rows // 2] * 2
        module: Any = model.module()
        assert all(one.p == 0 for one in module.modules() if isinstance(one, torch.nn.Dropout)), model.name

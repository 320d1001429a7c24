"""Predictions beside what was measured, and advice that holds: a run with the change takes what was foretold."""

from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memkit import (
    ActivationCheckpointing,
    ContaminationProbe,
    MemoryBudget,
    MemoryReport,
    PureBF16Precision,
)
from lightning_memkit.memory.report import PredictedStep, StepReport
from lightning_memkit.planning import choices
from lightning_memkit.plugins.memory_budget import _forecast
from lightning_memkit.plugins.planning import _given_run
from tests.plugins.test_contamination import Batches
from tests.plugins.test_contamination import model as packed_model
from tests.plugins.test_prediction import Language, Loader, batch
from tests.plugins.toys import trained, weights

ROWS, LENGTH, STEPS = 8, 64, 3


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is written where one stands."""
    monkeypatch.chdir(tmp_path)


def run(*callbacks: Any, **options: Any) -> tuple[nn.Module, StepReport]:
    report = MemoryReport(live=False, watched_steps=0, **options)
    data = Loader(batch(ROWS, LENGTH), STEPS)
    module, _ = trained(
        *callbacks, report, module=Language, data=data, max_steps=STEPS, precision="bf16-mixed"
    )
    assert report.report is not None
    return module, report.report


@pytest.mark.parametrize("size", [ROWS, 2])
@pytest.mark.long
def test_what_is_predicted_stands_beside_what_is_measured(size: int, capsys: Any) -> None:
    budget = [] if size == ROWS else [MemoryBudget("1GiB", micro_batch_size=size, recover=False)]
    _, found = run(*budget, predict=True)
    predicted, anatomy = found.predicted, found.anatomy
    assert predicted is not None
    assert predicted.what == ""
    assert predicted.peak_bytes == pytest.approx(anatomy.peak_bytes, rel=0.02)
    for category, measured in anatomy.at_peak.items():
        assert predicted.at_peak[category] == pytest.approx(measured, abs=0.02 * anatomy.peak_bytes)
    printed = capsys.readouterr().out
    assert "predicted" in printed
    assert "predicted peak" in Path("memory_report.html").read_text()


def test_states_that_the_run_has_are_not_predicted_twice() -> None:
    report = MemoryReport(measured_step=2, live=False, watched_steps=0, predict=True)
    data = Loader(batch(ROWS, LENGTH), STEPS)
    trained(report, module=Language, data=data, max_steps=STEPS, plugins=PureBF16Precision())
    assert report.report is not None
    measured, predicted = report.report.anatomy, report.report.predicted
    assert predicted is not None
    for category, held in measured.at_peak.items():
        assert predicted.at_peak[category] == pytest.approx(held, abs=0.002 * measured.peak_bytes)


@pytest.mark.filterwarnings("ignore:.*have no .val_dataloader")
def test_packed_documents_are_predicted_and_not_probed_again() -> None:
    report, module = MemoryReport(live=False, watched_steps=0, predict=True), packed_model()
    trained(ContaminationProbe(), report, module=module, data=Batches(), max_steps=STEPS)
    assert report.report is not None
    predicted = report.report.predicted
    assert predicted is not None
    assert predicted.what == ""
    assert predicted.peak_bytes == pytest.approx(report.report.anatomy.peak_bytes, rel=0.02)


@pytest.mark.long
def test_advice_comes_true_and_the_run_stays_as_it_was(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [choice for choice in choices.checkpointings() if choice.name in ("none", "full")]
    monkeypatch.setattr(choices, "checkpointings", lambda: tuple(few))
    monkeypatch.setattr(choices, "optimizer_states", lambda instead: ())
    state = torch.get_rng_state()
    plain, _ = run()
    before = torch.get_rng_state()
    torch.set_rng_state(state)
    module, found = run(predict=True, advise=True)
    assert torch.equal(weights(module), weights(plain))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.device.type == "cpu" for p in module.parameters())
    first = found.advice[0]
    assert f"Next: {first.how} ({first.change}): " in capsys.readouterr().out
    assert "ActivationCheckpointing(policy=" in Path("memory_report.html").read_text()
    by_change = {one.change: one for one in found.advice}
    assert {"activation checkpointing, full", "micro-batch 4 instead of 8"} <= set(by_change)
    assert not any("bfloat16" in change for change in by_change)  # the precision is given
    worth = [one.saved_bytes / max(one.time_share, 0.005) for one in found.advice if one.time_share > 0.005]
    assert worth == sorted(worth, reverse=True)
    for change, callback in (
        ("activation checkpointing, full", ActivationCheckpointing("full")),
        ("micro-batch 4 instead of 8", MemoryBudget("1GiB", micro_batch_size=4, recover=False)),
    ):
        one = by_change[change]
        _, changed = run(callback)
        saved = found.anatomy.peak_bytes - changed.anatomy.peak_bytes
        assert one.saved_bytes == pytest.approx(saved, rel=0.05), change
        assert one.changes == ""
        assert eval(
            one.how, {"ActivationCheckpointing": ActivationCheckpointing, "MemoryBudget": MemoryBudget}
        )


def test_what_can_not_be_predicted_is_said_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no forks\nhere")

    monkeypatch.setattr(_given_run, "contained_simulation", fail)
    module, found = run(predict=True, advise=True)
    assert found.predicted == PredictedStep(what="not predicted: no forks")
    assert found.advice == ()
    printed = capsys.readouterr().out
    assert "not predicted: no forks." in printed.replace("\n", " ")
    assert "predicted  " not in printed
    assert len(list(module.parameters())) > 0


def test_nothing_is_predicted_that_was_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_given_run, "contained_simulation", pytest.fail)
    _, found = run()
    assert found.predicted is None


def test_the_forecast_of_a_budget_is_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_forecast, "PAYS_FROM_PARAMETERS", 0)
    budget = MemoryBudget("64MiB")
    _, found = run(budget)
    size = found.run.micro_batch_size
    assert found.run.forecast_bytes == budget.predicted_peaks[size] > 0
    assert "MemoryBudget's forecast" in unescape(Path("memory_report.html").read_text())

"""A step that runs out of memory: what lived then, whether it is tried again or ends the run; torch's snapshots."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_memkit import MemoryBudget, MemoryReport
from lightning_memkit.memory.report import StepReport
from lightning_memkit.plugins.memory_report import _snapshot
from lightning_memkit.prediction.contained import contained
from lightning_memkit.testing import fail_at
from tests.plugins.fake_accelerator import on_fake_device
from tests.plugins.toys import ShardableTagger, TokenTagger, trained
from tests.testing.fake_device import fake_device

FILES = ("memory_report_oom.html", "memory_report_oom.json")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is written where one stands."""
    monkeypatch.chdir(tmp_path)


class Failing(ShardableTagger):
    """Runs out of memory in the backward of one batch, where the parts are too large."""

    at, most_rows = 1, 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self._fails = batch_idx == self.at and len(batch["x"]) > self.most_rows
        return super().training_step(batch, batch_idx)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with fail_at(6, armed=self._fails):
            super().backward(loss, *args, **kwargs)


class FailingLater(Failing):
    at = 3


class FailingWhole(Failing):
    most_rows = 4


class FailingWholeLater(FailingWhole):
    at = 3


def categories(report: StepReport, module: TokenTagger) -> dict[str, int]:
    """What is known by hand of a step that fails in its backward, after others."""
    weights = sum(parameter.nbytes for parameter in module.parameters())
    found = {name: report.anatomy.at_peak[name] for name in ("weights", "inputs")}
    assert found == {"weights": weights, "inputs": 8 * 12 * 8 * 2}
    states = report.anatomy.at_peak["optimizer_states"]
    assert 2 * weights <= states <= 2 * weights + 64
    return report.anatomy.at_peak


def test_a_metered_step_that_ends_the_run_is_taken_apart(capsys: Any) -> None:
    report = MemoryReport()
    module = Failing()
    with pytest.raises(torch.OutOfMemoryError):
        trained(report, module=module, max_steps=4)
    found = report.failed
    assert found is not None
    assert StepReport.from_json(Path(FILES[1])) == found
    at_peak = categories(found, module)
    assert at_peak["saved_activations"] > 0
    assert sum(at_peak.values()) == found.anatomy.peak_bytes == found.step.timeline.totals[-1]
    assert found.step.timeline.failed_at == len(found.step.timeline.ticks) - 1
    assert (found.run.step, found.anatomy.peak_phase, found.metered) == (1, "backward", True)
    assert found.anatomy.peak_operator in found.failure  # the fault names it
    assert "ran out of memory" in Path(FILES[0]).read_text()
    assert "what lived when step 1 failed" in capsys.readouterr().out
    assert torch._C._len_torch_dispatch_stack() == 0


def test_the_first_step_is_taken_apart_too() -> None:
    class First(Failing):
        at = 0

    report = MemoryReport()
    with pytest.raises(torch.OutOfMemoryError):
        trained(report, module=First, max_steps=4)
    assert report.failed is not None
    assert report.failed.anatomy.at_peak["optimizer_states"] == 0
    assert report.failed.anatomy.at_peak["saved_activations"] > 0


def test_a_metered_step_that_is_tried_again_is_taken_apart_and_measured_anew() -> None:
    plain, _ = trained(MemoryBudget("1GiB", micro_batch_size=4), module=ShardableTagger, max_steps=4)
    alone, report = MemoryReport(live=False), MemoryReport(live=False)
    trained(MemoryBudget("1GiB", micro_batch_size=4), alone, module=ShardableTagger, max_steps=2)
    budget = MemoryBudget("1GiB", micro_batch_size=8)
    module, _ = trained(budget, report, module=FailingWhole, max_steps=4)
    assert budget.retries == 1
    assert report.failed is not None
    assert report.failed.anatomy.at_peak["saved_activations"] > 0
    assert all(Path(name).exists() for name in FILES)
    # The retry is measured as a step in parts of 4 that nothing has gone wrong in.
    assert report.report is not None
    assert alone.report is not None
    assert report.report.run.micro_batch_size == 4
    assert report.report.flops.model == alone.report.flops.model
    assert report.report.anatomy.peak_bytes == pytest.approx(alone.report.anatomy.peak_bytes, rel=0.01)
    del plain, module


@pytest.mark.parametrize("retried", [True, False])
def test_a_step_that_is_not_metered_is_known_by_its_owners(retried: bool, capsys: Any) -> None:
    report = MemoryReport()
    module = FailingWholeLater() if retried else FailingLater()
    if retried:
        trained(MemoryBudget("1GiB", micro_batch_size=8), report, module=module, max_steps=4)
    else:
        with pytest.raises(torch.OutOfMemoryError):
            trained(report, module=module, max_steps=4)
    found = report.failed
    assert found is not None
    categories(found, module)
    assert not found.metered
    assert found.run.step == 3
    text = Path(FILES[0]).read_text()
    assert "It was not metered" in text
    assert 'class="plot"' not in text
    assert StepReport.from_json(Path(FILES[1])) == found


def test_on_a_device_that_counts_the_rest_is_what_its_allocator_had_handed_out() -> None:
    def train() -> tuple[int, dict[str, int]]:
        seen: list[int] = []

        class Counts(Callback):
            def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
                seen.append(torch.get_device_module("fake").memory_allocated())

        report = MemoryReport(live=False)
        with fake_device():
            place = {"accelerator": "auto", **on_fake_device()}
            with pytest.raises(torch.OutOfMemoryError):
                trained(Counts(), report, module=FailingLater, max_steps=4, **place)
        assert report.failed is not None
        return seen[0], report.failed.anatomy.at_peak

    allocated, at_peak = contained(train)  # where autograd has worked on a device, no later test can fork
    assert sum(at_peak.values()) == allocated > 0
    assert at_peak["temporaries"] > 0


def test_a_report_that_can_not_be_written_neither_hides_the_error_nor_ends_a_retry(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    report = MemoryReport(live=False, path=str(tmp_path / "file" / "report.json"), measured_step=9)
    with (
        pytest.warns(UserWarning, match="can't tell what lived when memory ran out"),
        pytest.raises(torch.OutOfMemoryError),
    ):
        trained(report, module=FailingLater, max_steps=4)
    budget = MemoryBudget("1GiB", micro_batch_size=8)
    with pytest.warns(UserWarning, match="can't tell what lived when memory ran out"):
        trained(budget, report, module=FailingWholeLater, max_steps=4)
    assert budget.retries == 1


def test_other_errors_write_nothing() -> None:
    class Broken(TokenTagger):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        trained(MemoryReport(live=False), module=Broken)
    assert not list(Path().iterdir())


CUDA = torch.device("cuda")


def test_snapshots_are_recorded_and_written_on_cuda_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("x"))
    monkeypatch.setattr(_snapshot, "_is_recording", lambda: False)
    path = tmp_path / "snapshot.pickle"
    _snapshot.record(torch.device("cpu"))()
    assert not _snapshot.dump(torch.device("cpu"), path)
    assert calls == []
    end = _snapshot.record(CUDA)
    assert calls == [{"max_entries": 200_000, "stacks": "python"}]
    assert _snapshot.dump(CUDA, path)
    assert path.read_text() == "x"
    end()
    assert calls[-1] == {"enabled": None}
    # What the user records goes on.
    monkeypatch.setattr(_snapshot, "_is_recording", lambda: True)
    _snapshot.record(CUDA)()
    assert len(calls) == 2


def test_a_snapshot_that_can_not_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(_snapshot, "_is_recording", lambda: False)  # asks for a driver
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", refuse)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", refuse)
    with pytest.warns(UserWarning, match="no snapshot of CUDA's allocator: no driver"):
        _snapshot.record(CUDA)()
    with pytest.warns(UserWarning, match="no driver"):
        assert not _snapshot.dump(CUDA, tmp_path / "x")


def test_the_private_names_of_snapshots_are_there() -> None:
    assert callable(torch.cuda.memory._record_memory_history)
    assert callable(torch.cuda.memory._dump_snapshot)


def test_the_json_of_a_failed_step_has_the_keys_of_a_report() -> None:
    report = MemoryReport()
    with pytest.raises(torch.OutOfMemoryError):
        trained(report, module=FailingLater, max_steps=4)
    assert report.report is not None
    assert set(json.loads(Path(FILES[1]).read_text())) == set(report.report.as_dict())

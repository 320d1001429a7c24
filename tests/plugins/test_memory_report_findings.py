# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false
"""What the report names in a real Trainer: leaks by their line, waste within a step, and nothing where all is well."""

import inspect
import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

from lightning_memkit import MemoryBudget, MemoryReport
from lightning_memkit.plugins.memory_report import _watch
from tests.plugins.toys import TokenTagger, loader, trained


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """The report is written where one stands."""
    monkeypatch.chdir(tmp_path)


def line_of(function, text):
    lines, start = inspect.getsourcelines(function)
    (index,) = [i for i, line in enumerate(lines) if text in line]
    return f"test_memory_report_findings.py:{start + index}"


class Keeping(TokenTagger):
    """Keeps something of every step; `how` says what and where."""

    def __init__(self, how):
        super().__init__()
        self.how, self.kept, self.named = how, [], {}

    def training_step(self, batch, batch_idx):
        hidden = self.mix(self.embedding(batch["x"]))[0]
        logits = self.head(hidden.flatten(0, 1))
        loss = F.cross_entropy(logits, batch["labels"].flatten())
        if self.how == "losses":
            self.kept.append(loss)
        elif self.how == "logits":
            self.kept.append({"logits": logits.detach()})
        elif self.how == "dict":
            self.named[batch_idx] = hidden.detach()
        return loss


@pytest.mark.parametrize(
    ("how", "line", "held"),
    [
        ("losses", "loss = F.cross_entropy", "Keeping.kept, a list of 5"),
        ("logits", "logits = self.head", "Keeping.kept, a list of 5"),
        ("dict", "hidden = self.mix", "Keeping.named, a dict of 5"),
    ],
)
def test_a_leak_is_named_by_file_and_line_after_five_steps(how, line, held, capsys):
    report = MemoryReport()
    seen = []

    class After(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append(len(report.findings))

    trained(report, After(), module=lambda: Keeping(how), max_steps=6)
    assert seen == [0, 0, 0, 0, 1, 1]
    (found,) = report.findings
    assert found.kind == "kept_tensors"
    assert line_of(Keeping.training_step, line) in found.where
    assert held in found.where
    assert ("with their graph" in found.what) == (how == "losses")
    assert str(found) in capsys.readouterr().out.replace("\n", "")
    saved = json.loads(Path("memory_report.json").read_text())
    assert saved["findings"][0]["where"] == found.where


class Careful(TokenTagger):
    """Logs, metrics with growing lists, a cached mask, a scheduler: all that lives on and is no leak."""

    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(50, ignore_index=-100)
        self.curve = BinaryAUROC()
        self.masks = {}

    def training_step(self, batch, batch_idx):
        out = super().training_step(batch, batch_idx)
        length = batch["x"].shape[1]
        if length not in self.masks:
            self.masks[length] = torch.ones(length, length).tril()
        self.accuracy(out["logits"].flatten(0, 1), batch["labels"].flatten())
        self.curve.update(out["logits"].flatten().sigmoid(), (out["logits"].flatten() > 0).int())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("logged", out["loss"], prog_bar=True, on_step=True, on_epoch=True)
        return out


def test_what_lives_on_in_a_healthy_run_is_no_leak(tmp_path):
    report = MemoryReport(live=False)
    callbacks = [WeightAveraging(), LearningRateMonitor("step")]
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=2)
    module, _ = trained(report, *callbacks, module=Careful, max_steps=8, logger=logger, log_every_n_steps=1)
    assert len(module.curve.preds) > 5
    assert report.findings == ()


def test_accumulation_and_workers_are_no_leak():
    report = MemoryReport(live=False)
    data = loader(num_workers=1, prefetch_factor=4, persistent_workers=True)
    trained(report, max_steps=4, accumulate_grad_batches=2, data=data)
    assert report.findings == ()


def test_short_runs_and_no_watch_find_nothing():
    for options, steps in (({}, 3), ({"watched_steps": 0}, 6)):
        report = MemoryReport(live=False, **options)
        trained(report, module=lambda: Keeping("losses"), max_steps=steps)
        assert report.findings == ()


def test_four_steps_are_judged_when_training_ends():
    report = MemoryReport(live=False)
    trained(report, module=lambda: Keeping("losses"), max_steps=4)
    assert len(report.findings) == 1


@pytest.mark.long
def test_under_a_budget_the_watch_waits_until_sizes_are_settled(monkeypatch):
    report, budget = MemoryReport(live=False), MemoryBudget("260KiB", enforce="always")
    settled, kept = [], []

    class KeepingElsewhere(Keeping):
        """Where no rollback looks; a list of the module's own would be composed of the parts' values."""

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            kept.append(loss)
            return loss

    enter = _watch.StepsWatch.enter

    def watched(self, budget, batches):
        enter(self, budget, batches)
        tuning = budget._engine.choice.tuning if budget._engine is not None else None
        if self._entered:
            settled.append(batches > 0 and (tuning is None or tuning.fastest.settled is not None))

    monkeypatch.setattr(_watch.StepsWatch, "enter", watched)
    trained(budget, report, module=lambda: KeepingElsewhere("nothing"), max_steps=60, data=loader(count=320))
    assert settled == [True] * 5
    (found,) = report.findings
    assert line_of(Keeping.training_step, "loss = F.cross_entropy") in found.where


class Wasteful(TokenTagger):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(32, 2000)

    def training_step(self, batch, batch_idx):
        hidden = self.mix(self.embedding(batch["x"]))[0].flatten(0, 1)
        logits = self.wide(hidden).bfloat16()
        return F.cross_entropy(logits.float(), batch["labels"].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=True)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


def test_waste_within_a_step_is_named_with_its_line(capsys):
    report = MemoryReport(live=False, least_bytes="64KiB")
    trained(report, module=Wasteful, max_steps=4)
    found = {finding.kind: finding for finding in report.findings}
    assert set(found) == {"logits_upcast", "foreach_copies", "zeroed_gradients"}
    assert line_of(Wasteful.training_step, "F.cross_entropy(logits.float()") in found["logits_upcast"].where
    assert line_of(Wasteful.optimizer_zero_grad, "set_to_none=False") in found["zeroed_gradients"].where
    count = sum(p.numel() for p in Wasteful().parameters() if p.requires_grad)
    assert found["zeroed_gradients"].size_bytes <= 4 * count
    printed = capsys.readouterr().out.replace("\n", "")
    worst = max(report.findings, key=lambda finding: finding.size_bytes)
    assert f"Next: {worst} (2 more in the report)" in printed


def test_small_waste_is_left_alone():
    report = MemoryReport(live=False, least_bytes="16MiB")
    trained(report, module=Wasteful, max_steps=4)
    assert report.findings == ()


def test_a_step_that_fails_leaves_no_watch_active():
    class Broken(TokenTagger):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise RuntimeError("a bug")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="a bug"):
        trained(MemoryReport(live=False), module=Broken, data=loader())
    assert torch._C._len_torch_dispatch_stack() == 0


def test_watched_steps_change_nothing():
    plain, _ = trained(max_steps=6)
    ours, _ = trained(MemoryReport(live=False), max_steps=6)
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)


def test_options_that_can_find_nothing_are_refused():
    with pytest.raises(ValueError, match=r"watched_steps=2 shows no growth"):
        MemoryReport(watched_steps=2)
    with pytest.raises(ValueError, match="'much' is not a size"):
        MemoryReport(least_bytes="much")

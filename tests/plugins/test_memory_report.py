import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_memkit import MemoryBudget, MemoryReport, PureBF16Precision
from lightning_memkit.plugins.memory_report._rates import tokens_of
from tests.plugins.toys import ShardableTagger, TokenTagger, loader, trained


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is written where one stands."""
    monkeypatch.chdir(tmp_path)


def test_the_table_and_the_json_take_the_measured_peak_apart(tmp_path: Path, capsys: Any) -> None:
    report, budget = MemoryReport(), MemoryBudget("260KiB", enforce="always")
    module, _ = trained(budget, report, max_steps=4, default_root_dir=tmp_path, log_every_n_steps=2)
    saved = json.loads((tmp_path / "memory_report.json").read_text())
    assert sum(saved["at_peak"].values()) == saved["peak_bytes"] <= budget.budget_bytes
    count = sum(p.numel() for p in module.parameters())
    assert saved["largest"]["weights"] == 4 * count
    assert saved["largest"]["gradients"] == 4 * count
    assert 8 * count <= saved["largest"]["optimizer_states"] <= 8 * count + 64  # AdamW's moments and steps
    assert saved["largest"]["saved_activations"] > 0
    assert saved["largest"]["inputs"] == 8 * 12 * 8 * 2  # two int64 tensors
    printed = capsys.readouterr().out
    assert "step 4/4 | loss 3.9" in printed
    assert "of 260.0 KiB" in printed
    for row in ("saved activations", "optimizer states", "micro-batch"):
        assert row in printed


def test_what_makes_up_for_missing_bits_is_told_from_the_moments() -> None:
    report = MemoryReport(measured_step=2, live=False)
    module, _ = trained(report, plugins=PureBF16Precision("kahan"), max_steps=3)
    assert report.anatomy is not None
    largest, count = report.anatomy.largest, sum(p.numel() for p in module.parameters())
    assert largest["compensation"] == 2 * count
    assert largest["optimizer_states"] < 8 * count + 64


def test_validation_values_are_printed(capsys: Any) -> None:
    class Validated(TokenTagger):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_count", float(len(batch["x"])), batch_size=1)

    trained(MemoryReport(), module=Validated, max_steps=2, data=None, val_check_interval=2,
            val_loaders=loader(count=16))  # fmt: skip
    assert "step 2 validation | val_count 8.0000" in capsys.readouterr().out


def test_the_metered_step_changes_nothing() -> None:
    plain, _ = trained(max_steps=4)
    metered, _ = trained(MemoryReport(live=False), max_steps=4)
    for a, b in zip(plain.parameters(), metered.parameters(), strict=True):
        assert torch.equal(a, b)


def test_values_reach_the_logger(tmp_path: Path) -> None:
    trained(MemoryReport(live=False), max_steps=6, log_every_n_steps=3, logger=CSVLogger(tmp_path),
            default_root_dir=tmp_path)  # fmt: skip
    header = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()[0]
    for name in ("memkit/samples_per_second", "memkit/loader_stall", "memkit/memory_gib"):
        assert name in header


def test_a_step_that_fails_leaves_no_meter_active() -> None:
    class Broken(TokenTagger):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise RuntimeError("a bug")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="a bug"):
        trained(MemoryReport(live=False), module=Broken, data=loader())
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="counted from 0"):
        MemoryReport(measured_step=-1)


# Torch's own tracing warns.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_modules_run_compiled_after_the_metered_step() -> None:
    runs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        return lambda *inputs: runs.append(1) or graph(*inputs)

    class Compiled(ShardableTagger):
        def __init__(self) -> None:
            super().__init__()
            self.mix.compile(backend=backend)

    trained(MemoryReport(live=False), module=Compiled, max_steps=8)
    assert len(runs) == 7  # all but the metered one
    torch._dynamo.reset()


def test_a_batch_that_is_one_tensor_has_no_tokens_and_is_not_asked_for_them_by_name() -> None:
    torch.set_warn_always(True)  # else torch says it to the first who asks, once a process
    try:
        assert tokens_of(torch.zeros(4, 8)) == 0
    finally:
        torch.set_warn_always(False)
    assert tokens_of([torch.zeros(4, 8)]) == 0
    assert tokens_of({"input_ids": torch.zeros(4, 8, dtype=torch.long)}) == 32

"""Each plugin under the Trainer's options: it trains what plain Lightning trains, and ends no training by itself."""

from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import CheckpointIO, Precision

from lightning_memkit import MemoryReport
from lightning_memkit.plugins.callbacks.initial_weights import InitialWeights
from tests.test_package import OFFLOADING, TRAINED, Blocks, build, give_weights, where
from tests.testing.fake_device import fake_device

pytestmark = [
    pytest.mark.filterwarnings("ignore:GradientRelease.*"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "barebones": {"barebones": True},
    "fast_dev_run": {"fast_dev_run": True},
    "limit_train_batches": {"limit_train_batches": 1, "max_epochs": 2},
    "log_never": {"log_every_n_steps": 0},
    "max_time": {"max_time": timedelta(hours=1)},
    "overfit": {"overfit_batches": 1},
    "reload": {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2},
    "profiler": {"profiler": "simple"},
    "anomalies": {"detect_anomaly": True},
    "no_inference_mode": {"inference_mode": False},
    "no_sanity_check": {"num_sanity_val_steps": 0},
    "clipped": {"gradient_clip_val": 0.1},
}
# What changes numbers by design: bfloat16 weights, and other weights to begin with.
PLAIN = [name for name in TRAINED if name not in OFFLOADING]
ITSELF = {"PureBF16Precision", "InitialWeights"}


class Watched(Blocks):
    """Is validated as well."""

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", super().training_step(batch, index))

    def val_dataloader(self) -> torch.utils.data.DataLoader:
        return self.train_dataloader()


def weights_after(
    plugins: list[Any], folder: Path, beside: tuple[Any, ...] = (), **options: Any
) -> torch.Tensor:
    """The weights that a Trainer with these options leaves."""
    for plugin in plugins:
        if isinstance(plugin, InitialWeights):
            give_weights(plugin, folder)
    quiet = {} if options.get("barebones") else {"logger": False, "enable_checkpointing": False}
    quiet |= {} if options.get("barebones") else {"enable_progress_bar": False, "enable_model_summary": False}
    torch.manual_seed(0)
    module = Watched()
    trainer = pl.Trainer(
        callbacks=[*beside, *(plugin for plugin in plugins if isinstance(plugin, pl.Callback))],
        plugins=[plugin for plugin in plugins if isinstance(plugin, (Precision, CheckpointIO))],
        default_root_dir=folder,
        **{**quiet, **where(plugins), "max_epochs": 1, **options},
    )
    trainer.fit(module)
    assert trainer.global_step > 0
    return torch.cat([parameter.detach().cpu().float().flatten() for parameter in module.parameters()])


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:.*(overfit|anomal|barebones|Anomaly)")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.long
def test_a_plugin_trains_as_plain_lightning_under_an_option(name, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ours = weights_after([build(name)], tmp_path, **OPTIONS[option])
    assert torch.isfinite(ours).all()
    if name not in ITSELF:
        theirs = weights_after([], tmp_path, **OPTIONS[option])
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:.*(overfit|anomal|barebones|Anomaly)")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", sorted(OFFLOADING))
def test_offloading_trains_under_an_option(name, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with fake_device():
        assert torch.isfinite(weights_after([build(name)], tmp_path, **OPTIONS[option])).all()


def test_a_report_stays_silent_where_nothing_is_logged(tmp_path, capsys):
    report = MemoryReport(path=str(tmp_path / "report.json"))
    weights_after([report], tmp_path, log_every_n_steps=0)
    assert report.report is not None
    assert "samples/s" not in capsys.readouterr().out


class Redirected(pl.Callback):
    """Sends the standard output elsewhere once training has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, to: Any) -> None:
        self.monkeypatch, self.to = monkeypatch, to

    def on_train_start(self, *_: Any) -> None:
        self.monkeypatch.setattr("sys.stdout", self.to)


def test_a_report_goes_where_the_standard_output_goes_by_then(tmp_path, monkeypatch):
    with open(tmp_path / "out.txt", "w+") as out:
        report = MemoryReport(path=str(tmp_path / "report.json"))
        weights_after([report], tmp_path, (Redirected(monkeypatch, out),), max_epochs=1)
        out.seek(0)
        assert "memory report" in out.read()


@pytest.mark.parametrize("name", [name for name in PLAIN if name != "GradientRelease"])
def test_accumulation_that_changes_by_the_epoch_is_the_same_beside_a_plugin(name, tmp_path, monkeypatch):
    """Two batches a step in the first epoch, one in the next; who can't go with it says so before training."""
    monkeypatch.chdir(tmp_path)

    def scheduled(plugins: list[Any]) -> torch.Tensor:
        return weights_after(plugins, tmp_path, (GradientAccumulationScheduler({0: 2, 1: 1}),), max_epochs=2)

    said = (
        pytest.warns(match="GradientAccumulationScheduler weighs")
        if name == "MemoryBudget"
        else nullcontext()
    )
    with said:
        ours = scheduled([build(name)])
    assert torch.isfinite(ours).all()
    if name not in ITSELF:
        torch.testing.assert_close(ours, scheduled([]), rtol=1e-5, atol=1e-6)

"""A run that resumes with another optimizer ends before its first step, with what to do."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_memkit import OnDeviceStrategy
from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.plugins.callbacks._resumed_optimizers import ResumedOptimizers
from tests.plugins.noise import NOISE

pytestmark = [
    *NOISE,
    pytest.mark.filterwarnings(
        "ignore:You're resuming from a checkpoint that ended before the epoch:UserWarning"
    ),
]


class Stepped(BoringModel):
    def __init__(self, kind: type[torch.optim.Optimizer]) -> None:
        super().__init__()
        self.kind, self.steps = kind, 0

    def configure_optimizers(self) -> torch.optim.Optimizer:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.kind(self.parameters(), lr=1e-3)  # pyright: ignore[reportCallIssue]

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        self.steps += 1


def fit(module: Stepped, max_steps: int, path: Path | None = None) -> Trainer:
    trainer = Trainer(
        strategy=OnDeviceStrategy("cpu"), max_steps=max_steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, ckpt_path=path)
    return trainer


def test_it_is_told_and_the_same_optimizer_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    fit(Stepped(torch.optim.AdamW), 2).save_checkpoint(path)
    for kind in (torch.optim.SGD, torch.optim.NAdam, torch.optim.Adagrad):
        module = Stepped(kind)
        with pytest.raises(
            CheckpointError, match=rf"written by Adam or AdamW .* this run's is {kind.__name__}\. Resume"
        ):
            fit(module, 4, path)
        assert module.steps == 0
    for callback in fit(Stepped(torch.optim.AdamW), 4, path).callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, ResumedOptimizers):
            assert not callback._saved
    again = Stepped(torch.optim.AdamW)
    assert fit(again, 4, path).global_step == 4
    assert again.steps == 2

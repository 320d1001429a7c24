"""Where an epoch ends before its loader does: each checkpoint of a limited run goes on with the next batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memkit import LoaderTuner
from tests.plugins.toys import trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:Be aware that when using `ckpt_path`"
)  # resumed runs save nothing
ROWS, BATCH = 40, 5
EPOCHS = {"every_n_epochs": 1, "save_on_train_epoch_end": True}
STEPS = {"every_n_train_steps": 1}


class Seeing(LightningModule):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.seen: list[tuple[int, list[Any]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = batch if isinstance(batch, Tensor) else batch["input_ids"]
        self.seen.append((self.current_epoch, rows.tolist()))
        return self.linear(rows.float().flatten()[:, None]).mean() * 1e-3

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Validated(Seeing):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def numbers(shuffle: bool) -> DataLoader:
    rows: Any = range(ROWS)
    return DataLoader(rows, BATCH, shuffle=shuffle, generator=torch.Generator().manual_seed(0))


def seen(folder: Path, data: Any, saves: dict[str, Any] | None, **options: Any) -> Seeing:
    torch.manual_seed(0)
    module = Validated() if "val_check_interval" in options else Seeing()
    callbacks: list[Any] = [LoaderTuner()]
    if saves is not None:
        callbacks.append(ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **saves))
    path = options.pop("ckpt_path", None)
    options = {
        "max_epochs": 3,
        "enable_checkpointing": saves is not None,
        "default_root_dir": folder,
        **options,
    }
    fit = trainer(*callbacks, max_steps=-1, **options)
    given: dict[str, Any] = {"val_dataloaders": numbers(False)} if "val_check_interval" in options else {}
    fit.fit(module, data, **given, ckpt_path=path)
    return module


@pytest.mark.parametrize("shuffle", [False, True], ids=["in_order", "shuffled"])
@pytest.mark.parametrize(
    ("options", "saves"),
    [
        ({"limit_train_batches": 2}, EPOCHS),
        ({"limit_train_batches": 0.5}, EPOCHS),
        ({"limit_train_batches": 3}, STEPS),
        ({"limit_train_batches": 8}, EPOCHS),
        ({"limit_train_batches": 4, "val_check_interval": 2}, {"save_on_train_epoch_end": False}),
        ({"limit_train_batches": 3, "accumulate_grad_batches": 3}, EPOCHS),
        ({}, STEPS),
    ],
    ids=str,
)
@pytest.mark.long
def test_a_limited_run_resumes_with_the_batch_that_comes_next(options, saves, shuffle, tmp_path):
    straight = seen(tmp_path / "straight", numbers(shuffle), None, **options)
    seen(tmp_path, numbers(shuffle), saves, **{**options, "max_epochs": 2})
    batches_a_step = options.get("accumulate_grad_batches", 1)

    paths = sorted(tmp_path.glob("*.ckpt"))
    assert paths
    for path in paths[:: max(1, len(paths) // 4)]:
        done = int(path.stem.split("=")[1]) * batches_a_step
        resumed = seen(tmp_path / "resumed", numbers(shuffle), None, **options, ckpt_path=path)
        assert resumed.seen == straight.seen[done:], path.name

# pyright: reportArgumentType=false
"""Batches are pinned where the training's device is the accelerator that copies them, and nowhere else."""

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_memkit import LoaderTuner, PackedDataModule
from lightning_memkit.data.loading.load_times import LoadTimes
from lightning_memkit.plugins.cli import doctor
from lightning_memkit.plugins.data._training_loaders import TrainingLoaders
from lightning_memkit.utilities.tensors import tensors_of
from tests.plugins.fake_accelerator import on_fake_device
from tests.testing.fake_device import fake_device
from tests.testing.needs import NEEDS_COMPILER

DOCUMENTS = [[1, 2, 3, 4], [5, 6, 7], [8, 9, 10, 11]]


class LooksAtBatches(pl.LightningModule):
    """Notes of each batch how many of its tensors are pinned, before it goes to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.pinned: list[bool] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.pinned.append(all(tensor.is_pinned() for tensor in tensors_of(batch)))
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return sum((tensor.sum() * self.weight for tensor in tensors_of(batch)), torch.zeros(()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def pinned_in_a_fit(place: dict[str, Any], callbacks: list[pl.Callback], data: Any) -> list[bool]:
    module = LooksAtBatches()
    pl.Trainer(
        callbacks=callbacks, max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **place,
    ).fit(module, **data)  # fmt: skip
    return module.pinned


def tuned() -> tuple[list[pl.Callback], dict[str, Any]]:
    return [LoaderTuner(max_workers=0, copy_ahead=False)], {
        "train_dataloaders": DataLoader(torch.ones(4, 2), 2)
    }


def packed() -> tuple[list[pl.Callback], dict[str, Any]]:
    return [], {"datamodule": PackedDataModule({"train": DOCUMENTS}, context=8, batch_size=1)}


@NEEDS_COMPILER
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("made", [tuned, packed])
def test_a_fit_on_an_accelerator_gets_pinned_batches_and_one_on_the_cpu_beside_it_gets_none(made):
    with fake_device():
        assert pinned_in_a_fit({"accelerator": "auto", **on_fake_device()}, *made()) == [True, True]
        assert pinned_in_a_fit({"accelerator": "cpu"}, *made()) == [False, False]


@pytest.mark.parametrize(
    ("present", "used", "pins"),
    [
        ("cuda", "cuda:1", True),
        ("cuda", "cpu", False),
        ("xpu", "xpu:0", True),
        ("mps", "mps", False),  # its memory is the host's
        (None, "cpu", False),
    ],
)
def test_loaders_and_the_doctor_ask_one_question(monkeypatch, present, used, pins):
    device = torch.device(used)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: present is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: present and torch.device(present))
    monkeypatch.setattr(doctor, "choose", lambda query: "loop")
    empty = torch.empty
    monkeypatch.setattr(doctor.torch, "empty", lambda *size, device, dtype: empty(*size, dtype=dtype))
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=device), global_rank=0, world_size=1, num_devices=1
    )

    loaders = TrainingLoaders(LoadTimes(), copy_ahead=False)
    assert loaders.take(trainer, DataLoader(torch.ones(4, 2), 2)).pin_memory is pins
    data = PackedDataModule({"train": DOCUMENTS}, context=8)
    data.trainer = trainer
    assert data._loader_options(shuffle=True).pin_memory is pins

    found = doctor.FoundDevice(
        name="", device=used, memory_bytes=1, free_bytes=1, capability=None, bfloat16="in hardware"
    )
    (said,) = (one for one in doctor._choices(found) if "pinned batches" in one.purpose)
    assert said.choice == ("yes" if pins else "no")

"""Evaluation within a budget on a device of its own: what is moved there, and what runs out there."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_memkit.micro_batching.options import BudgetOptions
from lightning_memkit.plugins.memory_budget._evaluation import keep_budget_in_evaluation
from tests.plugins.fake_accelerator import on_fake_device
from tests.plugins.toys import trainer
from tests.testing.fake_device import FakeDevice, fake_device
from tests.testing.needs import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER

ROWS, WIDTH = 64, 256
WEIGHTS = (WIDTH + 1) * 512 * 4  # bytes


class Rows(LightningModule):
    """Its input is larger than what it computes."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(WIDTH, 512)
        self.fake = [device]
        self.devices: list[str] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("mean", self.linear(batch).tanh().mean())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.linear(batch).tanh()

    def on_validation_batch_start(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.devices.append(batch.device.type)
        self.fake[0].reset_peak()

    def on_predict_batch_end(
        self, outputs: Tensor, batch: Tensor, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.devices.append(outputs.device.type)


def data() -> DataLoader:
    return DataLoader(torch.randn(2 * ROWS, WIDTH), batch_size=ROWS)  # pyright: ignore[reportArgumentType]


def validated(device: FakeDevice, options: BudgetOptions | None) -> tuple[Rows, float]:
    module, quiet = Rows(device), trainer(accelerator="auto", **on_fake_device())
    if options:
        keep_budget_in_evaluation(quiet, options)
    torch.manual_seed(1)
    return module, quiet.validate(module, data(), verbose=False)[0]["mean"]


def test_one_part_at_a_time_is_on_the_device() -> None:
    with fake_device() as device:
        whole, value = validated(device, None)
        peak = device.peak_bytes - WEIGHTS
        budget = BudgetOptions(budget_bytes=WEIGHTS + peak // 2, micro_batch_size=8)
        parts, other = validated(device, budget)
        assert other == pytest.approx(value, abs=1e-7)
        assert device.peak_bytes - WEIGHTS < peak / 4
    assert whole.devices == ["fake", "fake"]
    assert parts.devices == ["cpu", "cpu"]  # a batch that is split stays where its loader put it


def test_a_batch_that_fits_is_on_the_device_when_its_hooks_run() -> None:
    with fake_device() as device:
        module, _ = validated(device, BudgetOptions(budget_bytes=2**30))
    assert module.devices == ["fake", "fake"]


def test_a_device_that_runs_out_gets_smaller_parts() -> None:
    with fake_device() as device:
        _, value = validated(device, None)
        needed = device.peak_bytes - WEIGHTS
    with fake_device(budget_bytes=WEIGHTS + needed // 2) as device:
        module, other = validated(device, BudgetOptions(budget_bytes=2**30))
    assert other == pytest.approx(value, abs=1e-7)
    assert module.devices == ["cpu", "cpu"]


def test_predictions_that_do_not_fit_run_whole_and_their_hooks_get_them_as_ever() -> None:
    budget = BudgetOptions(budget_bytes=WEIGHTS + ROWS * 512 * 4, headroom=0.0)
    predicted: list[Any] = []
    modules: list[Rows] = []
    with fake_device() as device:
        for options in (None, budget):
            module, quiet = Rows(device), trainer(accelerator="auto", **on_fake_device())
            modules.append(module)
            torch.manual_seed(1)
            if options:
                keep_budget_in_evaluation(quiet, options)
                with pytest.warns(UserWarning, match="predict_step runs its batches of 64 samples whole"):
                    predicted.append(quiet.predict(module, data()))
            else:
                predicted.append(quiet.predict(module, data()))
    assert modules[1].devices == modules[0].devices == ["fake", "fake"]
    for one, other in zip(*predicted, strict=True):
        assert torch.equal(one, other)

"""Hooks that run in every micro-batch are named, once, where a batch is split, and only there."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import DeviceStatsMonitor, Timer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit import MemoryBudget, MemoryReport
from lightning_memkit.plugins.seams._checks import hooks_run_by_micro_batch
from tests.plugins.toys import trained, trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


class Small(LightningModule):
    def __init__(self, hook: str = "") -> None:
        super().__init__()
        self.net = nn.Linear(6, 1)
        if hook == "gradient":
            self.net.weight.register_hook(lambda gradient: gradient * 0.5)
        if hook == "clamp":
            self.net.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Before(Small):
    def on_before_backward(self, loss: Tensor) -> None:
        pass


class Looks(Callback):
    def on_before_backward(self, trainer: Any, pl_module: LightningModule, loss: Tensor) -> None:
        pass


def fit(module: Any, *callbacks: Any) -> None:
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    trained(*callbacks, module=module, data=data, max_steps=4)


CASES: list[tuple[Any, list[Any], str]] = [
    (Small, [Looks()], "Looks.on_before_backward"),
    (Before, [], "Before.on_before_backward"),
    (lambda: Small("gradient"), [], "net.weight's gradient"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("module", "callbacks", "named"), CASES)
def test_a_hook_is_named_once_where_batches_are_split(module: Any, callbacks: Any, named: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, *callbacks, MemoryBudget("1GiB", micro_batch_size=3))
    said = [str(one.message) for one in caught if "in every micro-batch" in str(one.message)]
    assert len(said) == 1
    assert named in said[0]
    assert "on_before_optimizer_step" in said[0]


def test_a_hook_that_does_more_than_scale_gradients_is_a_reason_not_to_split() -> None:
    with pytest.raises(RuntimeError, match=r"a hook on net\.weight's gradient.*on_before_optimizer_step"):
        fit(Small("clamp"), MemoryBudget("1GiB", micro_batch_size=3))
    fit(Small("clamp"), MemoryBudget("1GiB"))  # what fits runs whole


@pytest.mark.parametrize(("module", "callbacks", "named"), CASES)
def test_a_batch_that_runs_whole_needs_no_warning(module: Any, callbacks: Any, named: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, *callbacks, MemoryBudget("1GiB", micro_batch_size=8))
    assert not [one for one in caught if "micro-batch" in str(one.message) or named in str(one.message)]


def test_callbacks_of_lightning_and_ours_do_not_mind() -> None:
    callbacks = [Timer(), DeviceStatsMonitor(), MemoryReport(), MemoryBudget("1GiB")]
    assert hooks_run_by_micro_batch(trainer(*callbacks), Small()) == []

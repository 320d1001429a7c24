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
from tests.plugins.toys import trained, trainer, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


class Small(LightningModule):
    def __init__(self, hook: str = "") -> None:
        super().__init__()
        self.net = nn.Linear(6, 1)
        if hook == "gradient":
            self.net.weight.register_hook(lambda gradient: gradient * 0.5)
        if hook == "clamp":
            self.net.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        if hook == "clamp in place":
            self.net.weight.register_hook(lambda gradient: gradient.clamp_(-0.01, 0.01))
        if hook == "halve in place":
            self.net.weight.register_hook(lambda gradient: gradient.mul_(0.5))

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


@pytest.mark.parametrize("hook", ["clamp", "clamp in place"])
def test_a_hook_that_does_more_than_scale_gradients_is_a_reason_not_to_split(hook: str) -> None:
    with pytest.raises(RuntimeError, match=r"a hook on net\.weight's gradient.*on_before_optimizer_step"):
        fit(Small(hook), MemoryBudget("1GiB", micro_batch_size=3, within="step"))
    fit(Small(hook), MemoryBudget("1GiB"))  # what fits runs whole


class ClampsAfterBackward(Callback):
    def __init__(self) -> None:
        self.calls = 0

    def on_after_backward(self, trainer: Any, pl_module: LightningModule) -> None:
        self.calls += 1
        for parameter in pl_module.parameters():
            assert parameter.grad is not None
            parameter.grad.clamp_(-0.01, 0.01)


@pytest.mark.filterwarnings("ignore:.*in every micro-batch")
@pytest.mark.parametrize("size", [1, 3, "auto"])
@pytest.mark.parametrize("kind", ["halve in place", "after backward"])
def test_gradients_changed_by_a_factor_or_once_a_batch_are_the_plain_run_s(kind: str, size: Any) -> None:
    def run(*callbacks: Any) -> tuple[Tensor, int]:
        torch.manual_seed(0)
        clamps = [ClampsAfterBackward()] if kind == "after backward" else []
        module = Small(kind).double()
        x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
        trainer(*callbacks, *clamps, max_epochs=1, max_steps=-1).fit(module, data)
        return weights(module), clamps[0].calls if clamps else 0

    plain, calls = run()
    split, calls_of_split = run(MemoryBudget("1GiB", micro_batch_size=size))
    torch.testing.assert_close(split, plain, rtol=1e-12, atol=1e-14)
    assert calls_of_split == calls


@pytest.mark.parametrize(("module", "callbacks", "named"), CASES)
def test_a_batch_that_runs_whole_needs_no_warning(module: Any, callbacks: Any, named: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, *callbacks, MemoryBudget("1GiB", micro_batch_size=8))
    assert not [one for one in caught if "micro-batch" in str(one.message) or named in str(one.message)]


def test_callbacks_of_lightning_and_ours_do_not_mind() -> None:
    callbacks = [Timer(), DeviceStatsMonitor(), MemoryReport(), MemoryBudget("1GiB")]
    assert hooks_run_by_micro_batch(trainer(*callbacks), Small()) == []

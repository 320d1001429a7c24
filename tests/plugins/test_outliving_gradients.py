"""Gradients of earlier steps, which zero_grad keeps or never reaches: trials, retries and factors leave them alone."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from lightning_memkit.plugins.seams._checks import zeroes_gradients
from lightning_memkit.testing import fail_at
from tests.plugins.toys import trained, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")
ROWS = 8


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        self.gate: Any = None
        self.seen: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = self.net[1](self.net[0](batch["x"]))
        scores = self.net[2](hidden if self.gate is None else hidden * self.gate)
        labels = batch["y"].clone()
        labels[batch["x"][:, 0] > 0.5] = -100
        return F.cross_entropy(scores, labels)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.gate is not None:
            self.seen.append(self.gate.grad.clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), 0.1)


class Decayed(Plain):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        for p in self.net.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


class EverySecond(Plain):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class KeepingSGD(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.25)


class OwnOptimizer(Plain):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return KeepingSGD(self.net.parameters(), 0.1)


class Gate(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(8).double())


class Leaf(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.ones(8).double().requires_grad_()


class Documented(Plain):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=True)


class Fault(Callback):
    """Lets an allocation of one step fail."""

    def __init__(self, faults: Any, at: int) -> None:
        self.faults, self.at = faults, at

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.at:
            self.faults.arm()

    def on_train_batch_end(self, *_: Any) -> None:
        self.faults.disarm()


def rows() -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    data = [
        {
            "x": torch.randn(5, generator=generator).double(),
            "y": int(torch.randint(0, 3, (), generator=generator)),
        }
        for _ in range(48)
    ]
    return DataLoader(data, ROWS)  # pyright: ignore[reportArgumentType]


def run(kind: type[Plain], *callbacks: Any) -> Any:
    return trained(*callbacks, module=kind, data=rows(), dtype=torch.float64, max_steps=6)[0]


def assert_close(ours: Any, plain: Any) -> None:
    assert torch.allclose(weights(ours), weights(plain), atol=1e-14, rtol=0)
    assert all(torch.allclose(a, b, atol=1e-14, rtol=0) for a, b in zip(ours.seen, plain.seen, strict=True))


@pytest.mark.parametrize("kind", [Decayed, EverySecond, OwnOptimizer, Gate, Leaf])
@pytest.mark.long
def test_gradients_add_up_over_steps_as_without_micro_batches(kind: type[Plain]) -> None:
    plain = run(kind)
    assert_close(run(kind, MemoryBudget("1GiB", micro_batch_size=8)), plain)
    assert_close(run(kind, MemoryBudget("1GiB", micro_batch_size=3)), plain)


@pytest.mark.parametrize("kind", [Decayed, OwnOptimizer, Gate, Leaf])
def test_a_retry_adds_to_the_gradients_of_earlier_steps_once(kind: type[Plain]) -> None:
    plain = run(kind)
    budget = MemoryBudget("1GiB", micro_batch_size=4)
    with fail_at(20, armed=False) as faults:
        ours = run(kind, budget, Fault(faults, at=3))
    assert budget.retries
    assert_close(ours, plain)


@pytest.mark.parametrize("kind", [Plain, Documented, Gate])
def test_a_zero_grad_that_zeroes_is_recognized(kind: type[Plain]) -> None:
    module = kind()
    assert zeroes_gradients(module, module.configure_optimizers())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", [Decayed, EverySecond, OwnOptimizer])
def test_a_zero_grad_that_may_keep_gradients_is_recognized(kind: type[Plain]) -> None:
    module = kind()
    assert not zeroes_gradients(module, module.configure_optimizers())  # pyright: ignore[reportArgumentType]


class Reads(Plain):
    """Scales its loss by the last step's gradient, which Lightning zeroes only after `training_step`."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        gradient = self.net[0].weight.grad
        scale = 1.0 if not isinstance(gradient, Tensor) else 1.0 + float(gradient.norm())
        return super().training_step(batch, batch_idx) * scale


def test_a_step_that_reads_the_last_ones_gradients_runs_whole() -> None:
    assert_close(run(Reads, MemoryBudget("1GiB", micro_batch_size=8)), run(Reads))
    with pytest.raises(BudgetError, match=r"training_step reads net\.0\.weight\.grad"):
        run(Reads, MemoryBudget("1GiB", micro_batch_size=3))


class Norms(Callback):
    """Reads the last step's gradients where Lightning has not zeroed them yet."""

    def __init__(self) -> None:
        self.norms: list[float | None] = []

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gradient = pl_module.net[0].weight.grad
        self.norms.append(None if gradient is None else float(gradient.norm()))


@pytest.mark.parametrize("size", [1, 3])
def test_a_hook_before_zero_grad_sees_the_last_step_s_gradients(size: int) -> None:
    ours, plain = Norms(), Norms()
    run(Plain, plain)
    run(Plain, ours, MemoryBudget("1GiB", micro_batch_size=size))
    first, *later = plain.norms
    assert first is None
    assert len(later) > 3
    assert ours.norms == [None, *(pytest.approx(norm, rel=1e-4) for norm in later)]

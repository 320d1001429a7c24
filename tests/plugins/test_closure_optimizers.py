"""Optimizers that evaluate their closure, under MemoryBudget and PureBF16Precision, against plain runs."""

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit import MemoryBudget, PureBF16Precision
from tests.optim.closure_optimizers import COMPARING, OPTIMIZERS

BATCH = 12
Make = Callable[[Any], Optimizer]


class Regression(LightningModule):
    def __init__(self, make: Make, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
        self.make = make

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Optimizer:
        return self.make(self.parameters())


def loader(dtype: torch.dtype) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4 * BATCH, 6, generator=generator).to(dtype)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=BATCH)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def fit(module: Regression, *callbacks: Any, **options: Any) -> dict[str, Tensor]:
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, loader(next(module.parameters()).dtype))
    trained = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return {**trained, "loss": trainer.callback_metrics["loss"]}


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 5.0}])
@pytest.mark.long
def test_a_batch_in_parts_trains_as_the_whole_one(name: str, options: dict[str, Any]) -> None:
    plain = fit(Regression(OPTIMIZERS[name], torch.float64), **options)
    split = fit(Regression(OPTIMIZERS[name], torch.float64), MemoryBudget(micro_batch_size=5), **options)
    assert len({tuple(value.shape) for value in plain.values()}) > 1
    for key, value in plain.items():
        torch.testing.assert_close(split[key], value, rtol=1e-9, atol=1e-9)


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_batch_that_runs_whole_trains_bitwise_as_without(name: str) -> None:
    plain = fit(Regression(OPTIMIZERS[name], torch.float32))
    whole = fit(Regression(OPTIMIZERS[name], torch.float32), MemoryBudget(micro_batch_size=BATCH))
    for key, value in plain.items():
        assert torch.equal(whole[key], value)


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_trial_without_a_journal_asks_for_no_closure_in_vain(name: str) -> None:
    plain = fit(Regression(OPTIMIZERS[name], torch.float64))
    split = fit(Regression(OPTIMIZERS[name], torch.float64), MemoryBudget(micro_batch_size=5, recover=False))
    for key, value in plain.items():
        torch.testing.assert_close(split[key], value, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("name", ["SAM, closure optional", "SAM around AdamW, closure asserted", "LBFGS"])
def test_memory_that_runs_out_in_a_later_evaluation_is_retried_exactly(name: str) -> None:
    plain = fit(Regression(OPTIMIZERS[name], torch.float64))
    runs = [0]  # not the module's, whose attributes are put back

    class Failing(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            runs[0] += 1
            if self.trainer.current_epoch == 1 and batch_idx == 2 and runs[0] == first[0] + 2:
                raise torch.OutOfMemoryError(
                    "CUDA out of memory: a test's"
                )  # with weights in the middle of a step
            return super().training_step(batch, batch_idx)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            first[0] = runs[0]

    first = [0]
    budget = MemoryBudget(micro_batch_size=BATCH)
    trained = fit(Failing(OPTIMIZERS[name], torch.float64), budget)
    assert budget.retries == 1
    for key, value in plain.items():
        torch.testing.assert_close(trained[key], value, rtol=1e-9, atol=1e-9)


def on_masters(make: Make, size: int = BATCH) -> list[Tensor]:
    """Mixed precision as everybody knows it: float32 masters, a bfloat16 copy for forward and backward.

    Gradients of parts of so many rows are accumulated on the masters.
    """
    module = Regression(make, torch.float32)
    net = copy.deepcopy(module.net).bfloat16()
    masters = [Parameter(p.detach().clone()) for p in module.net.parameters()]
    optimizer: Any = make(masters)
    pairs = list(zip(net.parameters(), masters, strict=True))
    for _ in range(2):
        for x, y in loader(torch.float32):

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                for p, master in pairs:
                    p.detach().copy_(master.detach())
                    master.grad = torch.zeros_like(master)
                total = torch.zeros(())
                for rows, targets in zip(x.split(size), y.split(size), strict=True):
                    loss = (net(rows.bfloat16()) - targets).square().mean() * (len(rows) / BATCH)
                    loss.backward()
                    total += loss.detach()
                    for p, master in pairs:
                        assert p.grad is not None
                        assert master.grad is not None
                        master.grad += p.grad.float()
                        p.grad = None
                return total

            optimizer.step(closure)
    return [master.detach() for master in masters]


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", [None, BATCH, BATCH // 2])
def test_pure_bf16_is_bitwise_an_fp32_master(name: str, size: int | None) -> None:
    """Also in two parts of six rows, whose weight is exact."""
    precision = PureBF16Precision("split", states="exact")
    callbacks = [] if size is None else [MemoryBudget(micro_batch_size=size)]
    fit(Regression(OPTIMIZERS[name], torch.float32), *callbacks, plugins=[precision])
    (compensation,) = precision.compensations
    masters = on_masters(OPTIMIZERS[name], size or BATCH)
    for (_, trained), master in zip(compensation.float32_weights(), masters, strict=True):
        assert torch.equal(trained, master)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("compensation", ["kahan", "stochastic", "none"])
def test_rounded_weights_and_compared_evaluations_are_refused_at_setup(name: str, compensation: Any) -> None:
    """And no other optimizer is."""
    module = Regression(OPTIMIZERS[name], torch.float32)
    runs = []
    module.net.register_forward_pre_hook(lambda *_: runs.append(1))
    precision = PureBF16Precision(compensation)
    if name not in COMPARING:
        fit(module, plugins=[precision])
        return
    with pytest.raises(ValueError, match=f"^compensation='{compensation}'.*Write compensation='split'"):
        fit(module, plugins=[precision])
    assert not runs

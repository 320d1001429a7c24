"""A column of the labels for each task, of which each row has some: every task's mean is over its own rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit import MemoryBudget
from tests.plugins.toys import LossToy, trainer, weights

ROWS, STEPS, TASKS = 8, 8, 5
Loss = Callable[["Columns", Tensor, Tensor], Tensor]


class Columns(LossToy):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.net, self.head = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, TASKS)
        self.log_var = nn.Parameter(torch.zeros(TASKS))
        self.loss = loss


def errors(toy: Columns, states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The squared error and the mask, by row and task."""
    mask = labels.isfinite().to(states)
    return (toy.head(states) - labels.nan_to_num()).square() * mask, mask


def quotients(toy: Columns, states: Tensor, labels: Tensor) -> Tensor:
    error, mask = errors(toy, states, labels)
    return error.sum(0) / mask.sum(0).clamp(min=1)


def of_means(clamp: float) -> Loss:
    def loss(toy: Columns, states: Tensor, labels: Tensor) -> Tensor:
        error, mask = errors(toy, states, labels)
        return (error.mean(0) / mask.mean(0).clamp(min=clamp)).sum()

    return loss


def of_one_mean(clamp: float) -> Loss:
    def loss(toy: Columns, states: Tensor, labels: Tensor) -> Tensor:
        error, mask = errors(toy, states, labels)
        return error[:, 2].mean() / mask[:, 2].mean().clamp(min=clamp) + 0.1 * states.square().mean()

    return loss


def unclamped(toy: Columns, states: Tensor, labels: Tensor) -> Tensor:
    error, mask = errors(toy, states, labels)
    return (error.sum(0) / mask.sum(0)).mean()


def with_epsilon(toy: Columns, states: Tensor, labels: Tensor) -> Tensor:
    error, mask = errors(toy, states, labels)
    return (error.sum(0) / (mask.sum(0) + 1e-8)).mean()


def multiplied(toy: Columns, states: Tensor, labels: Tensor) -> Tensor:
    error, mask = errors(toy, states, labels)
    return ((1 / mask.sum(0).clamp(min=1)) * error.sum(0)).mean()


def of_tokens(toy: Columns, states: Tensor, labels: Tensor) -> Tensor:
    error, mask = (each[:, None].expand(-1, 3, -1) for each in errors(toy, states, labels))
    return (error.sum((0, 1)) / mask.sum((0, 1)).clamp(min=1)).mean()


def learned(toy: Columns, states: Tensor, labels: Tensor) -> Tensor:
    return (torch.exp(-toy.log_var) * quotients(toy, states, labels)).sum() + toy.log_var.sum()


def one_by_one(toy: Columns, states: Tensor, labels: Tensor) -> Tensor:
    """One head for all tasks, each added where a row has a label for it."""
    logits, total = toy.head(states), 0.1 * states.square().mean()
    for column in range(TASKS):
        kept = labels[:, column].isfinite()
        if kept.any():
            total = total + F.mse_loss(logits[kept, column], labels[kept, column])
    return total


LOSSES: dict[str, Loss] = {
    "summed": lambda *given: quotients(*given).sum(),
    "averaged": lambda *given: quotients(*given).mean(),
    "weighed": lambda *given: (quotients(*given) * torch.arange(1, TASKS + 1)).sum(),
    "dotted": lambda *given: quotients(*given) @ torch.arange(1, TASKS + 1).to(given[1]),
    "beside a mean": lambda *given: quotients(*given).sum() + given[1].square().mean(),
    "learned": learned,
    "unclamped": unclamped,
    "with an epsilon": with_epsilon,
    "multiplied": multiplied,
    "of tokens": of_tokens,
    "means, clamped near zero": of_means(1e-3),
    "means, clamped above counts": of_means(0.5),
    "one mean, clamped near zero": of_one_mean(1e-3),
    "one mean, clamped above counts": of_one_mean(0.5),
    "one mean, clamped above a count": of_one_mean(0.3),
    "one by one": one_by_one,
}


def fitted(
    loss: Loss, size: Any, missing: float, dtype: torch.dtype = torch.double, *, has_all: bool = True
) -> tuple[Tensor, list[float]]:
    torch.manual_seed(0)
    toy = Columns(loss).to(dtype)
    x, y = torch.randn(STEPS * ROWS, 6, dtype=dtype), torch.randn(STEPS * ROWS, TASKS, dtype=dtype)
    y[torch.rand(y.shape, generator=torch.Generator().manual_seed(1)) < missing] = torch.nan
    y[:, 1] = torch.nan
    if has_all:
        y[::ROWS] = 1.0  # one row of each batch has all tasks
    budget = [] if size is None else [MemoryBudget("1GiB", micro_batch_size=size, within="step")]
    trainer(*budget, max_epochs=1, max_steps=-1).fit(toy, DataLoader(TensorDataset(x, y), ROWS))
    return weights(toy), toy.losses


@pytest.mark.sampled(12)
@pytest.mark.parametrize("missing", [0.6, pytest.param(0.1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.long
def test_each_column_is_weighed_by_its_own_count(loss: Loss, size: int, missing: float) -> None:
    (ours, logged), (plain, expected) = (fitted(loss, one, missing) for one in (size, None))
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(torch.tensor(logged), torch.tensor(expected), rtol=1e-6, atol=1e-7)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("loss", ["summed", "means, clamped near zero", "learned", "one by one"])
@pytest.mark.long
def test_a_batch_may_lack_a_task(loss: str, size: int) -> None:
    (ours, logged), (plain, expected) = (
        fitted(LOSSES[loss], one, 0.85, has_all=False) for one in (size, None)
    )
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(torch.tensor(logged), torch.tensor(expected), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("loss", [of_means(1e-3), of_one_mean(1e-3), LOSSES["summed"]])
@pytest.mark.long
def test_a_clamp_is_known_as_float32_rounds_it(loss: Loss) -> None:
    (ours, logged), (plain, expected) = (fitted(loss, one, 0.6, torch.float32) for one in (3, None))
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.tensor(logged), torch.tensor(expected), rtol=1e-5, atol=1e-5)

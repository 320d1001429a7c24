"""Rows of several data sets, each judged by its own head or column: a micro-batch may hold one task of several.

Every task's mean is over its own rows of the batch. In a micro-batch with rows of one task, whichever it is, the loss
has one term of one kind.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit import MemoryBudget
from tests.plugins.toys import LossToy, trainer, weights

ROWS, TASKS = 8, 4
Loss = Callable[["DataSets", Tensor, Tensor], Tensor]


class DataSets(LossToy):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(TASKS))
        self.head = nn.Linear(8, TASKS)
        self.loss = loss


def mean_errors(toy: DataSets, states: Tensor, targets: Tensor, members: Sequence[Tensor]) -> Tensor:
    losses = [
        F.mse_loss(toy.heads[task](states[own])[:, 0], targets[own, 1])
        for task, own in enumerate(members)
        if own.any()
    ]
    return torch.stack(losses).sum()


def by_heads(toy: DataSets, states: Tensor, targets: Tensor) -> Tensor:
    return mean_errors(toy, states, targets, [targets[:, 0] == task for task in range(TASKS)])


def by_two_heads_a_row(toy: DataSets, states: Tensor, targets: Tensor) -> Tensor:
    first = targets[:, 0]
    members = [(first == task) | ((first + 1) % TASKS == task) for task in range(TASKS)]
    return mean_errors(toy, states, targets, members)


def by_columns(toy: DataSets, states: Tensor, targets: Tensor) -> Tensor:
    logits = toy.head(states)
    loss = 0.1 * states.square().mean()
    for task in range(TASKS):
        own = targets[:, 0] == task
        if own.any():
            loss = loss + F.mse_loss(logits[own, task], targets[own, 1])
    return loss


LOSSES = {"heads": by_heads, "two heads a row": by_two_heads_a_row, "columns": by_columns}
BATCHES = {
    "of one task, then of two": [[0] * 8] * 4 + [[0] * 4 + [1] * 4] * 4,
    "of one task, then of two in turn": [[0] * 8] * 4 + [[0, 1] * 4] * 4,
    "of two tasks, then of two others": [[0, 1] * 4] * 4 + [[2, 3] * 4] * 4,
    "of one task, then of two others": [[0] * 8] * 4 + [[2] * 3 + [3] * 5] * 4,
    "of one or of the other, then of both": [[0] * 8, [1] * 8] * 2 + [[0] * 5 + [1] * 3] * 4,
    "of all tasks": [[0, 1, 2, 3] * 2] * 8,
}


def fitted(loss: Loss, size: int | None, batches: Sequence[Sequence[int]]) -> tuple[Tensor, list[float]]:
    torch.manual_seed(0)
    toy = DataSets(loss).double()
    x, y = torch.randn(len(batches) * ROWS, 6).double(), torch.randn(len(batches) * ROWS).double()
    tasks = torch.tensor(batches).flatten().double()
    budget = [] if size is None else [MemoryBudget("1GiB", micro_batch_size=size, within="step")]
    rows = TensorDataset(x, torch.stack([tasks, y], dim=1))
    trainer(*budget, max_epochs=1, max_steps=-1).fit(toy, DataLoader(rows, ROWS))
    return weights(toy), toy.losses


@pytest.mark.sampled(13)
@pytest.mark.parametrize("batches", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.long
def test_each_task_counts_its_own_rows(loss: Loss, size: int, batches: Sequence[Sequence[int]]) -> None:
    (ours, logged), (plain, expected) = (fitted(loss, one, batches) for one in (size, None))
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(torch.tensor(logged), torch.tensor(expected), rtol=1e-6, atol=1e-7)

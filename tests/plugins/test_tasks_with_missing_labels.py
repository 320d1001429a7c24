"""Two tasks with one kind of loss, each added only where a row has a label for it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit import MemoryBudget
from tests.plugins.toys import LossToy, trainer, weights

ROWS, STEPS = 8, 10
Loss = Callable[["Tasks", Tensor, Tensor], Any]


def task(head: nn.Module, states: Tensor, labels: Tensor) -> Tensor | None:
    """The mean over the rows with a label; None without one."""
    kept = labels.isfinite()
    return F.mse_loss(head(states)[kept][:, 0], labels[kept]) if kept.any() else None


def one_optional(net: "Tasks", states: Tensor, labels: Tensor) -> Any:
    loss, other = (
        F.mse_loss(net.first(states)[:, 0], states.detach()[:, 0]),
        task(net.second, states, labels[:, 1]),
    )
    return loss if other is None else loss + other


def one_optional_first(net: "Tasks", states: Tensor, labels: Tensor) -> Any:
    loss, other = (
        F.mse_loss(net.first(states)[:, 0], states.detach()[:, 0]),
        task(net.second, states, labels[:, 1]),
    )
    return loss if other is None else 0.5 * other + loss


def both_optional(net: "Tasks", states: Tensor, labels: Tensor) -> Any:
    losses = [task(net.first, states, labels[:, 0]), task(net.second, states, labels[:, 1])]
    return sum(loss for loss in losses if loss is not None) + 0.1 * states.square().mean()


LOSSES: dict[str, Loss] = {
    "one optional": one_optional,
    "one optional, first": one_optional_first,
    "both optional": both_optional,
}


class Tasks(LossToy):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.first, self.second = nn.Linear(8, 1), nn.Linear(8, 1)
        self.loss = loss


def fitted(loss: Loss, size: Any, missing: Sequence[Sequence[int]]) -> tuple[Tensor, list[float]]:
    torch.manual_seed(0)
    net = Tasks(loss).double()
    x, y = (torch.randn(STEPS * ROWS, width, dtype=torch.double) for width in (6, 2))
    for column, rows in enumerate(missing):
        y[list(rows), column] = torch.nan
    budget = [] if size is None else [MemoryBudget("1GiB", micro_batch_size=size, within="step")]
    trainer(*budget, max_epochs=1, max_steps=-1).fit(net, DataLoader(TensorDataset(x, y), ROWS))
    return weights(net), net.losses


ALL = range(STEPS * ROWS)
MISSING: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "here and there": (range(0, 80, 3), range(0, 80, 4)),
    "of most rows": ([i for i in ALL if i % 7], [i for i in ALL if i % 5]),
    "of the rows of a part": ([24, 25, 26, 50], [27, 28, 29, 51, 52, 53]),
    "of later batches": (range(40, 72), [i for i in range(32, 64) if i % 8]),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("missing", MISSING.values(), ids=MISSING)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.long
def test_each_task_is_weighed_by_its_own_labels(loss: Loss, size: int, missing: Any) -> None:
    (ours, logged), (plain, expected) = fitted(loss, size, missing), fitted(loss, None, missing)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(torch.tensor(logged), torch.tensor(expected), rtol=1e-6, atol=1e-7)

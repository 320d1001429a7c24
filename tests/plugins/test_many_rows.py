"""Rows that act on each other only among many: a few rows add up, and the whole batch's loss shows that many don't."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit import MemoryBudget
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from tests.plugins.toys import trainer, weights

MANY, ROWS = 40, 48  # more rows than any comparison of gradients takes
FORWARDS: list[int] = []  # rows of each forward: not the module's own, which trials would put back


class Net(LightningModule):
    def __init__(self, loss: Callable[["Net", Tensor, Tensor], Tensor], dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 4))
        self.of_step = loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        FORWARDS.append(len(x))
        return self.of_step(self, x, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def each(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net.net(x), y, reduction="none")


def hardest(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return each(net, x, y).topk(min(MANY, len(x))).values.mean()


def of_limited_capacity(net: Net, x: Tensor, y: Tensor) -> Tensor:
    scores = net.net(x) * (torch.arange(len(x)) < MANY)[:, None]
    return F.cross_entropy(x[:, :4] + scores, y)


def without_the_farthest(net: Net, x: Tensor, y: Tensor) -> Tensor:
    losses = each(net, x, y)
    return losses[losses <= losses.detach().sort().values[min(MANY, len(x)) - 1]].mean()


def plain(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return each(net, x, y).mean()


def fit(loss: Any, size: Any, *, dropout: float = 0.0, dtype: Any = torch.float64) -> Net:
    FORWARDS.clear()
    torch.manual_seed(0)
    net = Net(loss, dropout).to(dtype)
    x, y = torch.randn(4 * ROWS, 6, dtype=dtype), torch.randint(0, 4, (4 * ROWS,))
    callbacks = [] if size is None else [MemoryBudget("1GiB", micro_batch_size=size, within="step")]
    trainer(*callbacks, max_epochs=1, max_steps=-1).fit(net, DataLoader(TensorDataset(x, y), ROWS))
    return net


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("loss", [hardest, of_limited_capacity, without_the_farthest])
@pytest.mark.long
def test_they_are_refused_before_a_step_is_wrong(loss: Any, dtype: Any, dropout: float) -> None:
    with pytest.raises(
        BudgetError, match=r"whole batch, and of .* for its micro-batches.*micro_batch_size = "
    ):
        fit(loss, 16, dropout=dropout, dtype=dtype)


@pytest.mark.parametrize("loss", [hardest, of_limited_capacity])
def test_what_fits_runs_whole(loss: Any) -> None:
    assert torch.equal(weights(fit(loss, "auto")), weights(fit(loss, None)))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_mean_over_rows_is_split_and_the_whole_batch_runs_without_a_backward(dropout: float) -> None:
    net = fit(plain, 16, dropout=dropout)
    whole = FORWARDS.count(ROWS)
    assert whole == 3 + (
        3 if dropout else 0
    )  # in the first three of four batches; with equal draws once more
    if not dropout:
        torch.testing.assert_close(weights(net), weights(fit(plain, None)), rtol=1e-12, atol=1e-14)


def test_a_whole_batch_that_does_not_fit_is_passed_over() -> None:
    def full(net: Net, x: Tensor, y: Tensor) -> Tensor:
        if len(x) > 32:
            raise torch.OutOfMemoryError("the device is full")
        return plain(net, x, y)

    net = fit(full, 16)
    torch.testing.assert_close(weights(net), weights(fit(plain, None)), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_loss_whose_rows_cancel_is_split(dtype: Any, shuffled: bool) -> None:
    """Advantages whose mean is zero, as those of GRPO's first step: what is left of the loss is rounding."""

    def signed(net: Net, x: Tensor, sign: Tensor) -> Tensor:
        return (net.net(x)[:, 0] * sign).mean()

    torch.manual_seed(0)
    x = torch.randn(2 * ROWS, 6, dtype=dtype).repeat_interleave(2, 0)
    sign = torch.tensor([1.0, -1.0], dtype=dtype).repeat(2 * ROWS)
    if shuffled:
        order = torch.cat([torch.randperm(ROWS) + first for first in range(0, 4 * ROWS, ROWS)])
        x, sign = x[order], sign[order]
    FORWARDS.clear()
    data = DataLoader(TensorDataset(x, sign), ROWS)
    budget = MemoryBudget("1GiB", micro_batch_size=16)
    trainer(budget, max_epochs=1, max_steps=-1).fit(Net(signed).to(dtype), data)
    assert FORWARDS[-3:] == [16, 16, 16]

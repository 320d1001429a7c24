"""A class whose weight is 0: rows that have no other class divide by 0, or by a guard, beside a second term."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit import MemoryBudget
from tests.plugins.toys import LossToy, trainer, weights

ROWS, STEPS, CLASSES = 8, 12, 4
WEIGHTS = torch.tensor([0.0, 1.0, 2.0, 0.5], dtype=torch.double)
Loss = Callable[["Classifier", Tensor, Tensor], Tensor]


def guarded(scores: Tensor, labels: Tensor) -> Tensor:
    summed = F.cross_entropy(scores, labels, weight=WEIGHTS, reduction="sum")
    return summed / WEIGHTS[labels].sum().clamp(min=1e-8)


def of_pixels(scores: Tensor, labels: Tensor) -> Tensor:
    """Two pixels a row, of one class."""
    pixels = torch.stack((scores, scores.flip(1)), 2)[..., None]
    return F.cross_entropy(pixels, labels[:, None, None].expand(-1, 2, 1), weight=WEIGHTS)


LOSSES: dict[str, Loss] = {
    "alone": lambda net, z, y: F.cross_entropy(z, y, weight=WEIGHTS),
    "beside a penalty": lambda net, z, y: F.cross_entropy(z, y, weight=WEIGHTS) + 0.1 * z.square().mean(),
    "beside another loss": lambda net, z, y: (
        F.cross_entropy(z, y, weight=WEIGHTS) + 0.1 * F.mse_loss(z[:, 0], y.double())
    ),
    "learned factor": lambda net, z, y: (
        F.cross_entropy(z, y, weight=WEIGHTS) * torch.exp(-net.scale) + net.scale + z.square().mean()
    ),
    "twice": lambda net, z, y: (
        0.5 * F.cross_entropy(z, y, weight=WEIGHTS)
        + F.cross_entropy(2 * z, y, weight=WEIGHTS)
        + z.square().mean()
    ),
    "guarded": lambda net, z, y: guarded(z, y) + 0.1 * z.square().mean(),
    "pixels": lambda net, z, y: of_pixels(z, y) + 0.1 * z.square().mean(),
}


class Classifier(LossToy):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.scale, self.loss = nn.Parameter(torch.tensor(0.1)), loss


def fitted(loss: Loss, size: Any) -> tuple[Tensor, list[float]]:
    torch.manual_seed(0)
    net = Classifier(loss).double()
    x, y = torch.randn(STEPS * ROWS, 6, dtype=torch.double), torch.randint(0, CLASSES, (STEPS * ROWS,))
    y[40:43] = 0
    y[16:24] = torch.tensor([0, 0, 0, 1, 2, 3, 0, 0])
    budget = [] if size is None else [MemoryBudget("1GiB", micro_batch_size=size, within="step")]
    trainer(*budget, max_epochs=1, max_steps=-1).fit(net, DataLoader(TensorDataset(x, y), ROWS))
    return weights(net), net.losses


@pytest.mark.sampled(7)
@pytest.mark.parametrize("size", [1, 3, "auto"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.long
def test_micro_batches_of_that_class_alone_count_nothing_and_spoil_nothing(loss: Loss, size: Any) -> None:
    (ours, logged), (plain, expected) = fitted(loss, size), fitted(loss, None)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(torch.tensor(logged), torch.tensor(expected), rtol=1e-6, atol=1e-9)

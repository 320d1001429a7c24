"""Batches in which a masked mean counts nothing, beside terms that count without it: penalties, and sums."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from tests.plugins.toys import trainer

ROWS, BATCHES = 8, 6
EMPTY = {"some batches are empty": (1, 3, 4), "a late one is": (5,), "none is": ()}
Loss = Callable[["Masked", dict[str, Tensor], Tensor], Tensor]


class Masked(LightningModule):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.loss = loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(self, batch, self.net(batch["x"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


def summed(batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    return (F.cross_entropy(scores, batch["y"], reduction="none") * batch["mask"]).sum()


def beside_sum(module: Masked, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """The sum's rows are trained on where the mean has none."""
    return summed(batch, scores) / (batch["mask"].sum() + 1e-8) + 0.1 * scores.square().sum()


def beside_sum_clamped(module: Masked, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    return summed(batch, scores) / batch["mask"].sum().clamp(min=1) + 0.1 * scores.square().sum()


def beside_penalty(module: Masked, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    """A penalty looks at no row: whatever a micro-batch counts, or is divided by, the batch has one."""
    penalty = sum(weight.square().sum() for weight in module.parameters())
    return summed(batch, scores) / batch["mask"].sum().clamp(min=1) + 0.1 * penalty


def beside_both(module: Masked, batch: dict[str, Tensor], scores: Tensor) -> Tensor:
    return beside_penalty(module, batch, scores) + 0.05 * scores.square().sum()


def trained(loss: Loss, density: float, empty: tuple[int, ...], size: int | None) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = [
        {
            "x": torch.randn(6, generator=generator).double(),
            "y": torch.randint(3, (), generator=generator),
            "mask": (torch.rand((), generator=generator) < density).double() * (row // ROWS not in empty),
        }
        for row in range(BATCHES * ROWS)
    ]
    torch.manual_seed(0)
    module, callbacks = Masked(loss), [MemoryBudget("1GiB", micro_batch_size=size)] if size else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = DataLoader(rows, batch_size=ROWS)  # pyright: ignore[reportArgumentType]
        trainer(*callbacks, max_epochs=2).fit(module, data)
    return nn.utils.parameters_to_vector(module.parameters()).detach()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("density", [0.2, 0.6, 1.0])
@pytest.mark.parametrize("empty", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("loss", [beside_sum, beside_sum_clamped, beside_penalty, beside_both])
@pytest.mark.sampled(25)
@pytest.mark.long
def test_weights_are_the_unsplit_batch_s(
    loss: Loss, empty: tuple[int, ...], density: float, size: int
) -> None:
    """Sums lost the rows of all micro-batches but the first, unsaid; penalties were refused."""
    torch.testing.assert_close(
        trained(loss, density, empty, size), trained(loss, density, empty, None), rtol=0, atol=1e-12
    )

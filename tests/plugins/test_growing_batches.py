"""Batches that are larger than the first one, under a size of the user's that holds them all."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from tests.plugins.toys import trainer, weights


class Net(LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = nn.Linear(6, 4).double(), kind

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        if self.kind == "mean":
            return F.cross_entropy(out, batch[1])
        out = F.normalize(out)
        return F.cross_entropy(out @ out.roll(1, 1).T / 0.1, torch.arange(len(out)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(kind: str, *callbacks: Any) -> Tensor:
    torch.manual_seed(0)
    module = Net(kind)
    generator = torch.Generator().manual_seed(1)
    data: Any = [
        (torch.randn(n, 6, generator=generator, dtype=torch.float64), torch.arange(n) % 4)
        for n in (2, 8, 11, 3, 12)
    ]
    trainer(*callbacks, max_epochs=1, max_steps=-1).fit(module, DataLoader(data, batch_size=None))
    return weights(module)


@pytest.mark.parametrize("size", [12, 64])
@pytest.mark.parametrize("kind", ["mean", "contrastive"])
def test_they_run_whole(kind: str, size: int) -> None:
    """They were cut into parts of as many rows as the first batch had, or refused."""
    assert torch.equal(fit(kind, MemoryBudget("1GiB", micro_batch_size=size)), fit(kind))

"""Dropout of few numbers: two seeds draw the same mask now and then, which is no proof against noise."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from tests.plugins.toys import trainer


class OnScores(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3), nn.Dropout(0.2))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch["x"]), batch["y"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("seed", [19, 20])
def test_it_is_not_refused(seed: int) -> None:
    """With seed 20 a second draw for the three scores of two rows is equal to the first."""
    torch.manual_seed(seed)
    module, generator = OnScores().double(), torch.Generator().manual_seed(seed)
    data: list[Any] = []
    for _ in range(16):
        x = torch.randn(5, generator=generator).double()
        data.append({"x": x, "y": int(torch.randint(0, 3, (), generator=generator))})
    loader: Any = DataLoader(data, batch_size=8)  # pyright: ignore[reportArgumentType]
    budget = MemoryBudget("1GiB", micro_batch_size=3)
    trainer(budget, max_steps=1).fit(module, loader)
    assert [change.micro_batch_size for change in budget.history] == [3]

"""What a step that runs again had in memory is gone before it does, without the garbage collector."""

import gc
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from tests.plugins.toys import trainer

OTHER_LOSS_FROM = 3
hidden: list[Any] = []  # a module's attributes would be state of its steps
alive: list[int] = []


class Net(LightningModule):
    """Its loss is another one from batch 3 on, which only its graph shows; notes whether activations live on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if hidden and hidden[-1]() is not None:
            alive.append(batch_idx)
        out = self.net(batch).tanh()
        hidden.append(ref(out))
        return out.square().mean() if batch_idx < OTHER_LOSS_FROM else out.abs().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.fixture
def without_collector() -> Iterator[None]:
    hidden.clear()
    alive.clear()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
def test_activations_of_a_step_whose_loss_was_another_one_are_freed_before_it_is_compared() -> None:
    data: Any = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
    budget = MemoryBudget("1GiB", micro_batch_size=2)
    trainer(budget, max_steps=5).fit(Net(), DataLoader(data, batch_size=4))
    assert len(hidden) > 5
    assert not alive

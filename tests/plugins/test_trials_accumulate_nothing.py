"""The micro-batches of a trial add up: that is no reason to accumulate the run's own gradients in float32."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memkit import MemoryBudget, PureBF16Precision
from tests.plugins.test_unlike_batches import Net, fitted


class Counting(Net):
    """A state that every step changes is compared in micro-batches that run one after the other."""

    def __init__(self, loss: Any) -> None:
        super().__init__(loss)
        self.register_buffer("rows", torch.zeros(()))
        self.dtypes: set[torch.dtype] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.rows += len(batch["y"])
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.dtypes |= {p.grad.dtype for p in self.parameters() if p.grad is not None}


def loss(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(net(batch["x"].bfloat16()).float(), batch["y"])


def test_a_batch_that_runs_whole_keeps_bfloat16_gradients() -> None:
    module = fitted(
        loss, lambda index, batch, generator: batch, MemoryBudget("1GiB", micro_batch_size=8), kind=Counting,
        plugins=[PureBF16Precision()],
    )  # fmt: skip
    assert module.dtypes == {torch.bfloat16}

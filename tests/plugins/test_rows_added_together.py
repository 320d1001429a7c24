"""Losses that add up tensors of rows, some of which have a gradient only for some rows: batches add different ones."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit import MemoryBudget
from tests.plugins.toys import trainer, weights

ROWS, STEPS, WORDS = 8, 10, 100


class Words(LightningModule):
    """A mean over rows of torch's adaptive softmax, whose clusters add only where a label is in them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 16)
        self.head = nn.AdaptiveLogSoftmaxWithLoss(16, WORDS, cutoffs=[10, 40])

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        return self.head(self.body(batch[0]), batch[1]).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Bonus(Words):
    """Rows of a rare kind get a second loss, which is added to those of all rows."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        states, labels = self.body(batch[0]), batch[1]
        losses = (
            self.head.head(states)
            .square()
            .sum(1)[:, None]
            .expand(-1, 2)
            .gather(1, (labels[:, None] % 2))[:, 0]
        )
        rare = labels >= 40
        if rare.any():
            losses = losses + rare * self.head.tail[0](states).square().mean(1)
        return losses.mean()


def fitted(kind: type[Words], size: Any, rare: Sequence[int]) -> Tensor:
    """The weights after ten steps; `rare` are the places, in the data, of rows with rare labels."""
    torch.manual_seed(0)
    module = kind().double()
    x, y = torch.randn(STEPS * ROWS, 6, dtype=torch.double), torch.randint(0, 10, (STEPS * ROWS,))
    y[list(rare)] = torch.tensor([15, 50, 70, 30])[torch.arange(len(rare)) % 4]
    budget = [] if size is None else [MemoryBudget("1GiB", micro_batch_size=size, within="step")]
    trainer(*budget, max_epochs=1, max_steps=-1).fit(module, DataLoader(TensorDataset(x, y), ROWS))
    return weights(module)


RARE: dict[str, Sequence[int]] = {
    "in one row": [20],
    "in all rows of a part": [16, 17, 18, 41],
    "in two late batches": [54, 61],
    "in two batches": [33, 62],
    "in half of the batches": [3, 6, 14, 20, 31, 45, 59, 67],
    "from the start": range(0, STEPS * ROWS, 5),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("rare", RARE.values(), ids=RARE)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", [Words, Bonus])
def test_micro_batches_give_the_whole_batchs_result(
    kind: type[Words], size: Any, rare: Sequence[int]
) -> None:
    torch.testing.assert_close(fitted(kind, size, rare), fitted(kind, None, rare), rtol=1e-12, atol=1e-14)

"""A net that makes much of the last bits of its forward: its parts round otherwise than its batch, and no more."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit import MemoryBudget
from lightning_memkit.micro_batching.proof.comparison import last_bits_turned
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from tests.plugins.toys import trainer

WIDTH, DEPTH, ROWS, CLASSES = 32, 60, 12, 10


class Deep(LightningModule):
    """Layers without residuals: roundings of 1e-7 are 2e-5 of the gradients.

    Args:
        coupling: how much of the batch's mean is taken from each row, once.
    """

    def __init__(self, coupling: float = 0.0) -> None:
        super().__init__()
        self.coupling = coupling
        layers = [
            layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
        ]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, labels = batch
        return F.cross_entropy(self.net(x - self.coupling * x.mean(0)), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def fitted(seed: int, coupling: float = 0.0) -> MemoryBudget:
    torch.manual_seed(seed)
    module, budget = Deep(coupling), MemoryBudget("1GiB", micro_batch_size=5, within="step")
    data = TensorDataset(torch.randn(3 * ROWS, WIDTH), torch.arange(3 * ROWS) % CLASSES)
    trainer(budget, max_epochs=1, enable_progress_bar=False).fit(module, DataLoader(data, batch_size=ROWS))
    return budget


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.long
def test_a_deep_net_is_split(seed: int) -> None:
    """The rounding of its backward alone, which a scaled loss shows, is a twentieth of what its forward makes."""
    assert [change.micro_batch_size for change in fitted(seed).history] == [5]


def test_what_rows_do_to_each_other_in_it_is_refused() -> None:
    with pytest.raises(BudgetError, match="act on each other"):
        fitted(0, coupling=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_with_other_last_bits_are_put_back_to_the_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.LazyLinear(2)).to(dtype)
    module[1].weight = module[0].bias = nn.Parameter(torch.randn(4, dtype=dtype))  # tied
    initialized = [one for one in module.parameters() if not isinstance(one, nn.UninitializedParameter)]
    before = [one.detach().clone() for one in initialized]
    versions = [one._version for one in initialized]
    with suppress(RuntimeError), last_bits_turned(module):
        turned = [one.detach().clone() for one in initialized]
        raise RuntimeError("of a step")
    for other, then in zip(turned, before, strict=True):
        assert (other != then).all()
        assert torch.allclose(other, then, rtol=4 * torch.finfo(dtype).eps, atol=1e-30)
    assert all(torch.equal(now, then) for now, then in zip(initialized, before, strict=True))
    assert versions == [one._version for one in initialized]  # it is no change of the step's

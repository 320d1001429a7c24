"""Steps that return None first, and act on rows of each other later: nothing is split that was never compared."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from tests.plugins.toys import trainer, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*returned `None`")


class Contrastive(LightningModule):
    """Negatives within the batch; None in the first step, or for rows of which few are positive."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        self.kind = kind

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        x, y = batch
        if batch_idx == 0 if self.kind == "first" else int((y > 0).sum()) < 2:
            return None
        out = F.normalize(self.net(x))
        return F.cross_entropy(out @ out.roll(1, 1).T / 0.1, torch.arange(len(out)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(kind: str, *callbacks: Any) -> Tensor:
    torch.manual_seed(0)
    module = Contrastive(kind)
    generator = torch.Generator().manual_seed(1)
    data: Any = [
        (
            torch.randn(8, 6, generator=generator, dtype=torch.float64),
            torch.randint(0, 4, (8,), generator=generator),
        )
        for _ in range(6)
    ]
    trainer(*callbacks, max_epochs=1, max_steps=-1).fit(module, DataLoader(data, batch_size=None))
    return weights(module)


@pytest.mark.parametrize("kind", ["first", "few"])
def test_what_fits_runs_whole_and_a_given_size_is_refused(kind: str) -> None:
    assert torch.equal(fit(kind, MemoryBudget("1GiB")), fit(kind))
    for size in (1, 3):
        with pytest.raises(BudgetError, match="act on each other|returns None for some"):
            fit(kind, MemoryBudget("1GiB", micro_batch_size=size, within="step"))

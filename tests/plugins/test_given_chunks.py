"""A user's micro_batch_size on a loss that can't be split: the rows of a chunk. The oracle is the plain run."""

import copy
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

ROWS, WIDTH = 8, 16


class Unsplittable(LightningModule):
    """A tower, and a loss or a state that micro-batches would make another one of."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.tower = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
        self.weight = nn.Parameter(torch.randn(6, WIDTH, dtype=torch.float64))
        self.teacher = copy.deepcopy(self.tower).requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        out = x @ self.weight if self.kind == "no module" else self.tower(x)
        late = batch_idx >= 3
        if self.kind in ("contrastive", "no module") or (self.kind == "contrastive later" and late):
            unit = F.normalize(out)
            return F.cross_entropy(unit @ unit.roll(1, 1).T / 0.1, torch.arange(len(unit)))
        loss = F.cross_entropy(out, y)
        if self.kind == "teacher":
            with torch.no_grad():
                for mean, new in zip(self.teacher.parameters(), self.tower.parameters(), strict=True):
                    mean.lerp_(new, 0.3)
                wanted = self.teacher(x)
            return loss + F.mse_loss(out, wanted)
        if self.kind == "hardest":
            return F.cross_entropy(out, y, reduction="none").topk(max(1, len(x) // 2)).values.mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(kind: str, *callbacks: Any) -> Unsplittable:
    torch.manual_seed(0)
    module = Unsplittable(kind)
    generator = torch.Generator().manual_seed(1)
    data: Any = [
        (
            torch.randn(n, 6, generator=generator, dtype=torch.float64),
            torch.randint(0, 4, (n,), generator=generator),
        )
        for n in (ROWS, ROWS, 5, ROWS, 2, ROWS, ROWS + 3)
    ]
    trainer(*callbacks, max_epochs=1, max_steps=-1).fit(module, DataLoader(data, batch_size=None))
    return module


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", ["contrastive", "contrastive later", "teacher", "hardest"])
@pytest.mark.long
def test_the_loss_is_the_whole_batch_s_and_the_tower_runs_in_chunks_of_that_size(
    kind: str, size: int
) -> None:
    """It was refused, although within="modules" was a remedy that needed no other size."""
    budget = MemoryBudget("1GiB", micro_batch_size=size)
    plain, ours = fit(kind), fit(kind, budget)
    torch.testing.assert_close(weights(ours), weights(plain), rtol=1e-12, atol=1e-13)
    for mine, theirs in zip(ours.teacher.parameters(), plain.teacher.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)
    assert budget.history[-1].chunk_rows == size


@pytest.mark.parametrize("kind", ["contrastive", "no module"])
def test_it_is_refused_where_only_steps_may_be_split_or_no_module_can_run_in_chunks(kind: str) -> None:
    within: Any = "step" if kind == "contrastive" else "auto"
    with pytest.raises(BudgetError, match="act on each other"):
        fit(kind, MemoryBudget("1GiB", micro_batch_size=3, within=within))


def test_a_size_of_the_whole_batch_needs_no_chunks() -> None:
    budget = MemoryBudget("1GiB", micro_batch_size=ROWS + 3)
    assert torch.equal(weights(fit("contrastive", budget)), weights(fit("contrastive")))
    assert all(change.chunk_rows is None for change in budget.history)

"""Batches that are larger than the first one, under a size of the user's that holds them all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from tests.plugins.toys import trainer, weights

ROOM = {"rows": 1000}  # that the device has room for


class Net(LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = nn.Linear(6, 4).double(), kind

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if len(batch[0]) > ROOM["rows"]:
            raise torch.OutOfMemoryError("the device is full")
        out = self.net(batch[0])
        if self.kind == "mean":
            return F.cross_entropy(out, batch[1])
        out = F.normalize(out)
        return F.cross_entropy(out @ out.roll(1, 1).T / 0.1, torch.arange(len(out)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(*rows: int) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    data: Any = [
        (torch.randn(n, 6, generator=generator, dtype=torch.float64), torch.arange(n) % 4) for n in rows
    ]
    return DataLoader(data, batch_size=None)


def fit(kind: str, *callbacks: Any) -> Tensor:
    torch.manual_seed(0)
    module = Net(kind)
    trainer(*callbacks, max_epochs=1, max_steps=-1).fit(module, loader(2, 8, 11, 3, 12))
    return weights(module)


def resumed(path: Path, first: tuple[int, ...], then: tuple[int, ...], *budgets: MemoryBudget) -> Tensor:
    """Two epochs of these batches, with a checkpoint between them."""
    torch.manual_seed(0)
    module = Net("mean")
    for index, rows in enumerate((first, then)):
        fitted = trainer(*budgets[index : index + 1], max_epochs=index + 1, max_steps=-1)
        fitted.fit(module, loader(*rows), ckpt_path=path if index else None)
        fitted.save_checkpoint(path)
        ROOM["rows"] = 1000
    return weights(module)


@pytest.mark.parametrize("size", [12, 64])
@pytest.mark.parametrize("kind", ["mean", "contrastive"])
def test_they_run_whole(kind: str, size: int) -> None:
    """They were cut into parts of as many rows as the first batch had, or refused."""
    assert torch.equal(fit(kind, MemoryBudget("1GiB", micro_batch_size=size)), fit(kind))


def test_they_run_whole_in_a_resumed_run(tmp_path: Path) -> None:
    plain = resumed(tmp_path / "plain.ckpt", (2, 2), (2, 8, 11))
    budgets = [MemoryBudget("1GiB", micro_batch_size=12) for _ in range(2)]
    assert torch.equal(resumed(tmp_path / "ours.ckpt", (2, 2), (2, 8, 11), *budgets), plain)


def test_a_resumed_run_keeps_the_size_that_an_oom_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first batch holds no more rows than that size, and the next one would run whole again."""
    monkeypatch.setitem(ROOM, "rows", 6)
    budgets = [MemoryBudget("1GiB", micro_batch_size=12) for _ in range(2)]
    resumed(tmp_path / "ours.ckpt", (6, 12), (6, 12), *budgets)
    assert [budget.state_dict()["holds"] for budget in budgets] == [6, 6]
    assert budgets[1].retries == budgets[0].retries == 1

"""Run on two ranks by test_ranks_unlike.py: batches of unlike sizes, and losses that are not known to split."""

import sys
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_memkit import MemoryBudget
from tests.plugins.ranks import leave
from tests.plugins.toys import LossToy, trainer, weights

SIZES, STEPS, WIDTH = (3, 5), 4, 6


class Rows(LossToy):
    def __init__(self, loss: Callable[["Rows", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)
        self.loss = loss


def contrastive(toy: Rows, out: Tensor, y: Tensor) -> Tensor:
    """Each row is to be more like its own target than like all other rows'."""
    return F.cross_entropy(F.normalize(out, dim=1) @ F.normalize(y, dim=1).T, torch.arange(len(y)))


def columns(toy: Rows, out: Tensor, y: Tensor) -> Tensor:
    """The mean over the tasks that some of the rows have: another number of tasks for other rows."""
    has = y > 0.5
    losses = (out.square() * has).sum(0) / has.sum(0).clamp(min=1)
    return losses[has.any(0)].mean()


LOSSES = {"contrastive": contrastive, "columns": columns}


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """One rank's."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.x, self.y = torch.randn(2, STEPS, SIZES[rank], WIDTH, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def fitted(loss: str, *, budget: bool) -> Tensor:
    torch.manual_seed(0)
    toy = Rows(LOSSES[loss]).double()
    callbacks = [MemoryBudget("1GiB", within="step")] if budget else []
    of_all = trainer(
        *callbacks,
        max_epochs=1,
        max_steps=-1,
        use_distributed_sampler=False,
        devices=2,
        strategy="ddp_find_unused_parameters_true",
    )
    of_all.fit(toy, DataLoader(Batches(of_all.global_rank), batch_size=None))
    return weights(toy)


def main(path: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {loss: [fitted(loss, budget=budget) for budget in (False, True)] for loss in LOSSES}
    torch.save(found, f"{path}.{torch.distributed.get_rank()}")
    leave()


if __name__ == "__main__":
    main(sys.argv[1])

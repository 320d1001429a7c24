"""Run on two ranks by test_ranks_unlike.py: batches of unlike sizes, and losses that are not known to split."""

import sys
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_memkit import MemoryBudget
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
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


def hardest_later(toy: Rows, out: Tensor, y: Tensor) -> Tensor:
    """A mean over rows at first, then over the two hardest: of micro-batches of one row it is the mean."""
    each = (out - y).square().mean(1)
    return each.mean() if toy.global_step < 2 else each.topk(min(2, len(each))).values.mean()


def beside_a_penalty(toy: Rows, out: Tensor, y: Tensor) -> Tensor:
    """A mean, a sum, and what depends on no row: it adds up, each in its own way."""
    penalty = sum(weight.square().sum() for weight in toy.net.parameters())
    return (out - y).square().mean() + 0.01 * out.square().sum() + 0.1 * penalty


def more_of_many(toy: Rows, out: Tensor, y: Tensor) -> Tensor:
    """With a further term in the whole batch of rank 1 only."""
    loss = (out - y).square().mean()
    return loss + out.abs().mean() if len(y) == max(SIZES) else loss


LOSSES = {"contrastive": contrastive, "columns": columns}


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """The batches of a rank."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.x, self.y = torch.randn(2, STEPS, SIZES[rank], WIDTH, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def fitted(
    loss: Callable[[Rows, Tensor, Tensor], Tensor], size: int | Literal["auto"] | None
) -> Tensor | str:
    """The trained weights, or why training was refused; no `size` trains under DDP alone."""
    torch.manual_seed(0)
    toy = Rows(loss).double()
    callbacks = [] if size is None else [MemoryBudget("1GiB", micro_batch_size=size, within="step")]
    of_all = trainer(
        *callbacks,
        max_epochs=1,
        max_steps=-1,
        use_distributed_sampler=False,
        devices=2,
        strategy="ddp_find_unused_parameters_true",
    )
    try:
        of_all.fit(toy, DataLoader(Batches(of_all.global_rank), batch_size=None))
    except BudgetError as error:
        return str(error)
    return weights(toy)


def main(path: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {
        name: [fitted(loss, size) for size in (None, "auto")] for name, loss in LOSSES.items()
    }
    found["hardest"] = fitted(hardest_later, 1)
    found["more"] = fitted(more_of_many, 1)
    found["penalty"] = fitted(beside_a_penalty, 1)
    torch.save(found, f"{path}.{torch.distributed.get_rank()}")
    leave()


if __name__ == "__main__":
    main(sys.argv[1])

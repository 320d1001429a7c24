"""A task for each column: what its mean divides by is counted in the batch before it runs, and not by forwards."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from tests.plugins.toys import LossToy, trainer, weights

ROWS, TASKS, SIZE = 16, 4, 4
Batch = dict[str, Tensor]
Loss = Callable[["Columns", Batch], Tensor]
FORWARDS = Counter[int]()  # by step; not the module's own, which a trial would put back


class Columns(LossToy):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5 * TASKS))
        self.of_batch = loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        FORWARDS[self.trainer.global_step] += 1
        loss = self.of_batch(self, batch)
        self.log("loss", loss)
        return loss


def classes(toy: Columns, batch: Batch) -> Tensor:
    logits = toy.net(batch["x"]).unflatten(1, (TASKS, 5))
    each = [F.cross_entropy(logits[:, k], batch["classes"][:, k], ignore_index=-100) for k in range(TASKS)]
    return torch.stack(each).sum()


def classes_or_minus_one(toy: Columns, batch: Batch) -> Tensor:
    """Missing labels are -1."""
    labels = batch["classes"].clamp(min=-1)
    logits = toy.net(batch["x"]).unflatten(1, (TASKS, 5))
    return sum(
        (F.cross_entropy(logits[:, k], labels[:, k], ignore_index=-1) for k in range(TASKS)), torch.zeros(())
    )


def targets(toy: Columns, batch: Batch) -> Tensor:
    """Missing targets are NaN."""
    found = toy.net(batch["x"])
    loss = 0.1 * found.square().mean()
    for column in range(TASKS):
        known = batch["targets"][:, column].isfinite()
        loss = loss + F.mse_loss(found[known, column], batch["targets"][known, column])
    return loss


def clamped(toy: Columns, batch: Batch) -> Tensor:
    """A micro-batch may lack a task, whose divisor of 1 is then no count."""
    found, known = toy.net(batch["x"])[:, :TASKS], batch["targets"].isfinite().to(batch["x"])
    error = (found - batch["targets"].nan_to_num()).square() * known
    return (error.sum(0) / known.sum(0).clamp(min=1)).mean()


def masked(toy: Columns, batch: Batch) -> Tensor:
    """Weights of zero and one, for each task."""
    error, mask = toy.net(batch["x"])[:, :TASKS].square(), batch["mask"]
    return ((error * mask).sum(0) / mask.sum(0)).mean()


def weighed(toy: Columns, batch: Batch) -> Tensor:
    """A weight for each row and task."""
    error, each = toy.net(batch["x"])[:, :TASKS].square(), batch["weights"]
    return ((error * each).sum(0) / each.sum(0)).sum()


def by_class(toy: Columns, batch: Batch) -> Tensor:
    """Some classes of one column count for one head, and others for another."""
    found, labels = toy.net(batch["x"]).unflatten(1, (TASKS, 5)), batch["classes"][:, 0]
    one, others = labels == 1, labels > 1
    first = (found[:, 0].square().mean(1) * one).sum() / one.sum().clamp(min=1)
    return first + (found[:, 1].abs().mean(1) * others).sum() / others.sum().clamp(min=1)


LOSSES = {
    "classes": classes,
    "minus one": classes_or_minus_one,
    "targets": targets,
    "clamped": clamped,
    "masked": masked,
    "weighed": weighed,
    "by class": by_class,
}


def batches(steps: int) -> list[Batch]:
    generator, another = (torch.Generator().manual_seed(seed) for seed in (0, 1))

    def one() -> Batch:
        x = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, 5, (ROWS, TASKS), generator=generator)
        values = torch.randn(ROWS, TASKS, generator=generator, dtype=torch.float64)
        missing = torch.rand(ROWS, TASKS, generator=generator) < 0.4
        missing[::SIZE] = False
        return {
            "x": x,
            "classes": labels.where(~missing, -100),
            "targets": values.where(~missing, torch.nan),
            "mask": (~missing).double(),
            "weights": torch.rand(ROWS, TASKS, generator=another, dtype=torch.float64),
        }

    return [one() for _ in range(steps)]


def fitted(loss: Loss, data: list[Batch], *callbacks: Any) -> Columns:
    torch.manual_seed(0)
    toy = Columns(loss).double()
    trainer(*callbacks, max_epochs=1, max_steps=-1).fit(toy, DataLoader(data, batch_size=None))  # pyright: ignore
    return toy


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.long
def test_what_a_column_counts_takes_no_forward(loss: Loss) -> None:
    """Each batch took a forward of every micro-batch for ever, and twice as many where divisors are clamped."""
    data = batches(30)
    budget = MemoryBudget("1GiB", micro_batch_size=SIZE, within="step")
    plain = fitted(loss, data)
    FORWARDS.clear()
    ours = fitted(loss, data, budget)
    torch.testing.assert_close(weights(ours), weights(plain), rtol=1e-12, atol=1e-13)
    late = [FORWARDS[step] for step in range(24, 30)]
    # One of the whole, where there is more of something than in any batch before.
    assert max(late) <= ROWS // SIZE + 1
    assert late.count(ROWS // SIZE) >= 4

"""Numbers beside the loss that one row can't tell from it: a group's loss, the largest, a sum, an unweighted mean."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from tests.plugins.toys import trainer

Batch = dict[str, Tensor]
Step = Callable[["Net", Batch, Tensor], Any]  # of the module, its batch, and the loss of each row


class Net(LightningModule):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.step, self.seen = step, list[dict[str, Any]]()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.step(self, batch, F.cross_entropy(self.net(batch["x"]), batch["y"], reduction="none"))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        logged = {f"logged {name}": float(value) for name, value in self.trainer.callback_metrics.items()}
        self.seen.append({**{name: float(value) for name, value in outputs.items()}, **logged})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(sizes: tuple[int, ...] = (8, 8, 8, 8, 5)) -> DataLoader:
    data: list[Batch] = []
    for index, rows in enumerate(sizes):
        generator = torch.Generator().manual_seed(1000 + index)
        x = torch.randn(rows, 6, generator=generator).double()
        labels = torch.randint(0, 4, (rows,), generator=generator)
        group = torch.randint(0, 3, (rows,), generator=generator)
        weight = torch.rand(rows, generator=generator).double()
        data.append({"x": x, "y": labels, "group": group, "weight": weight})
    return DataLoader(data, batch_size=None)  # pyright: ignore[reportArgumentType]


def fitted(step: Step, size: int | None) -> tuple[Net, dict[str, float], str]:
    """The module, what its epoch has logged, and what was said of values."""
    torch.manual_seed(0)
    module, callbacks = (
        Net(step).double(),
        [] if size is None else [MemoryBudget("1GiB", micro_batch_size=size)],
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = trainer(*callbacks, max_epochs=1, max_steps=-1)
        fit.fit(module, batches())
    of_epoch = {name: float(value) for name, value in fit.callback_metrics.items()}
    return module, of_epoch, " ".join(str(one.message) for one in caught if "micro-batch" in str(one.message))


def by_group(net: Net, batch: Batch, losses: Tensor) -> Any:
    for group in batch["group"].unique().tolist():
        chosen = batch["group"] == group
        net.log(f"loss_{group}", losses[chosen].mean(), on_epoch=True, batch_size=int(chosen.sum()))
    return losses.mean()


def mean_beside_a_sum(net: Net, batch: Batch, losses: Tensor) -> Any:
    net.log("mean", losses.mean())
    return losses.sum()


def sum_beside_a_mean(net: Net, batch: Batch, losses: Tensor) -> Any:
    net.log("sum", losses.sum(), reduce_fx="sum")
    return losses.mean()


def worst(net: Net, batch: Batch, losses: Tensor) -> Any:
    net.log("worst", losses.max())
    return losses.mean()


def unweighted(net: Net, batch: Batch, losses: Tensor) -> Any:
    net.log("plain", losses.mean())
    return (losses * batch["weight"]).sum() / batch["weight"].sum()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("step", [by_group, mean_beside_a_sum, sum_beside_a_mean, worst, unweighted])
@pytest.mark.long
def test_what_equals_the_loss_of_each_single_row_is_not_taken_for_the_batch_s(step: Step) -> None:
    whole, of_epoch, _ = fitted(step, None)
    split, of_epoch_split, _ = fitted(step, 1)
    for ours, theirs in zip(split.seen, whole.seen, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)  # Lightning keeps logged numbers in float32
    assert of_epoch_split == pytest.approx(of_epoch, rel=1e-6)


def median(net: Net, batch: Batch, losses: Tensor) -> Any:
    net.log("median", losses.median())
    return losses.mean()


def test_a_median_which_no_rule_joins_is_named() -> None:
    assert "logs as 'median' can't be made" in fitted(median, 1)[2]


def logs_the_loss(net: Net, batch: Batch, losses: Tensor) -> Any:
    kept = batch["y"] > 1
    loss = (losses * batch["weight"]).sum() / batch["weight"].sum()
    loss = loss + 0.1 * (losses * kept).sum() / kept.sum().clamp(min=1)
    net.log("train_loss", loss, on_epoch=True, batch_size=len(kept))
    net.log("same", loss.detach() * 1)
    return {"loss": loss, "again": loss.detach().clone()}


def logs_the_loss_in_few_batches(net: Net, batch: Batch, losses: Tensor) -> Any:
    loss = (losses * batch["weight"]).sum() / batch["weight"].sum()
    if net.global_step > 2:
        net.log("train_loss", loss)
    return loss


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("step", [logs_the_loss, logs_the_loss_in_few_batches])
@pytest.mark.long
def test_the_loss_of_several_terms_is_logged_as_the_batch_s_without_a_word(step: Step, size: int) -> None:
    whole, of_epoch, _ = fitted(step, None)
    split, of_epoch_split, said = fitted(step, size)
    for ours, theirs in zip(split.seen, whole.seen, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert of_epoch_split == pytest.approx(of_epoch, rel=1e-6)
    assert not said


def returned_by_group(net: Net, batch: Batch, losses: Tensor) -> Any:
    groups = {int(group): batch["group"] == group for group in batch["group"].unique()}
    means = {f"loss_{group}": losses[chosen].mean().detach() for group, chosen in groups.items()}
    return {"loss": losses.mean(), **means}


@pytest.mark.parametrize("size", [1, 3])
def test_what_is_returned_of_some_micro_batches_only_is_there_and_right_or_named(size: int) -> None:
    whole, _, _ = fitted(returned_by_group, None)
    split, _, said = fitted(returned_by_group, size)
    for ours, theirs in zip(split.seen, whole.seen, strict=True):
        assert ours.keys() == theirs.keys()
        wrong = [name for name in theirs if ours[name] != pytest.approx(theirs[name], rel=1e-9)]
        assert all(f"returns as '{name}' can't be made" in said for name in wrong)


def counted_in_groups(net: Net, batch: Batch, losses: Tensor) -> Any:
    sums = {f"n_{g}": (batch["group"] == g).sum() for g in range(3) if (batch["group"] == g).any()}
    return {"loss": losses.mean(), **sums}


@pytest.mark.parametrize("size", [1, 3])
def test_a_sum_that_some_micro_batches_return_is_that_of_those(size: int) -> None:
    whole, _, _ = fitted(counted_in_groups, None)
    split, _, said = fitted(counted_in_groups, size)
    assert split.seen == [pytest.approx(theirs) for theirs in whole.seen]
    assert not said


def empty_of_few(net: Net, batch: Batch, losses: Tensor) -> Any:
    return {"loss": losses.mean(), **({} if len(losses) > 4 else {"few": 1.0})}


def none_of_few(net: Net, batch: Batch, losses: Tensor) -> Any:
    return {"loss": losses.mean(), **({"many": losses.mean().detach()} if len(losses) > 4 else {})}


@pytest.mark.parametrize(("step", "name"), [(empty_of_few, "few"), (none_of_few, "many")])
def test_what_only_micro_batches_or_only_the_whole_returns_is_named(step: Step, name: str) -> None:
    assert f"returns as '{name}' can't be made" in fitted(step, 3)[2]


def logs_some(net: Net, batch: Batch, losses: Tensor) -> Any:
    """The share of all rows that are in a group, which a batch without it does not log."""
    for group in batch["group"].unique().tolist():
        net.log(f"share_{group}", (batch["group"] == group).double().mean())
    return losses.mean()


def first_six(net: Net, batch: Batch, losses: Tensor) -> Any:
    net.log("first", losses[:6].mean())
    return losses.mean()


@pytest.mark.parametrize(("step", "name"), [(logs_some, "share_0"), (first_six, "first")])
@pytest.mark.parametrize("size", [1, 3])
def test_a_logged_number_that_the_whole_batch_contradicts_is_named(step: Step, name: str, size: int) -> None:
    assert f"logs as '{name}' can't be made" in fitted(step, size)[2]

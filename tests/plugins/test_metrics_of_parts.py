"""Numbers that a step logs or returns beside its loss are the unsplit batch's, or a warning names them."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit import MemoryBudget
from tests.plugins.toys import trainer

ROWS, BATCHES = 8, 8
Metric = Callable[[Tensor, Tensor], Any]  # of logits and labels


def right(x: Tensor, y: Tensor) -> Tensor:
    return (x.argmax(-1) == y).to(x.dtype)


def labelled(y: Tensor) -> Tensor:
    return y != -100


JOINED: dict[str, Metric] = {
    "a mean over rows": lambda x, y: right(x, y).mean(),
    "a mean over labels": lambda x, y: (right(x, y) * labelled(y)).sum() / labelled(y).sum(),
    "a mean over labels, kept from zero": lambda x, y: (
        (right(x, y) * labelled(y)).sum() / labelled(y).sum().clamp(min=1)
    ),
    "a sum": lambda x, y: right(x, y).sum(),
    "a count": lambda x, y: torch.tensor(float(len(y))),
    "labels": lambda x, y: labelled(y).sum().float(),
    "the largest": lambda x, y: x.max(),
    "the smallest": lambda x, y: x.min(),
    "a perplexity": lambda x, y: F.cross_entropy(x, y).exp(),
    "a number of Python": lambda x, y: float((x > 0).float().mean()),
    "a constant": lambda x, y: 3.0,
}
NOT_JOINED: dict[str, Metric] = {
    "a norm": lambda x, y: x.norm(),
    "a deviation": lambda x, y: x.std(),
    "a quotient": lambda x, y: right(x, y).sum() / ((x.argmax(-1) == 1).sum() + 1),
}


class Measured(LightningModule):
    """Every fourth row has no label, and every eighth besides: micro-batches of one row may count nothing."""

    def __init__(self, metric: Metric, *, how: str = "logged", every: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(dropout), nn.Linear(16, 4))
        self.metric, self.how, self.every = metric, how, every
        self.seen: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x = self.net(batch[0].to(next(self.parameters()).dtype))
        loss = F.cross_entropy(x, batch[1])
        value = self.metric(x.detach(), batch[1])
        if self.how == "returned":
            return {"loss": loss, "metric": value}
        if batch_idx % self.every == self.every - 1:
            self.log("metric", value)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.how == "returned":
            self.seen.append(float(outputs["metric"]))
        elif "metric" in self.trainer.callback_metrics:
            self.seen.append(float(self.trainer.callback_metrics["metric"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def run(
    module: Measured, size: int | None, dtype: torch.dtype = torch.float32, split: Any = None, **options: Any
) -> tuple[list[float], str]:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4)
    x, y = torch.randn(ROWS * BATCHES, 6), torch.randint(0, 4, (ROWS * BATCHES,))
    y[::4] = y[1::8] = -100
    callbacks = [] if size is None else [MemoryBudget(micro_batch_size=size, split=split)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(*callbacks, **{"max_epochs": 1, **options}).fit(
            module.to(dtype), DataLoader(TensorDataset(x, y), batch_size=ROWS)
        )
    return module.seen, " ".join(str(one.message) for one in caught if "'metric'" in str(one.message))


@pytest.mark.sampled(15)
@pytest.mark.parametrize("how", ["logged", "returned"])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", JOINED)
def test_numbers_beside_the_loss_are_the_unsplit_batchs(name: str, size: int, how: str) -> None:
    wanted, _ = run(Measured(JOINED[name], how=how), None)
    found, warned = run(Measured(JOINED[name], how=how), size)
    assert found == pytest.approx(wanted, rel=1e-5, nan_ok=True)
    assert not warned


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", JOINED)
def test_so_are_those_that_few_batches_log(name: str) -> None:
    """The probe of the first batches has not seen them."""
    wanted, _ = run(Measured(JOINED[name], every=4), None)
    found, warned = run(Measured(JOINED[name], every=4), 3)
    assert found == pytest.approx(wanted, rel=1e-5, nan_ok=True)
    assert not warned


@pytest.mark.parametrize("name", ["a mean over rows", "a mean over labels", "a sum"])
def test_so_are_those_of_few_bits(name: str) -> None:
    wanted, _ = run(Measured(JOINED[name]), None, torch.bfloat16)
    found, warned = run(Measured(JOINED[name]), 1, torch.bfloat16)
    assert found == pytest.approx(wanted, rel=8e-3, nan_ok=True)
    assert not warned


@pytest.mark.sampled(6)
@pytest.mark.parametrize("how", ["logged", "returned"])
@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("name", NOT_JOINED)
def test_what_no_rule_gives_is_named(name: str, size: int, how: str) -> None:
    found, warned = run(Measured(NOT_JOINED[name], how=how), size)
    assert len(found) == BATCHES
    assert "can't be made from a batch's micro-batches" in warned


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["a mean over rows", "a mean over labels", "a sum", "the largest"])
@pytest.mark.long
def test_looks_at_parts_of_a_step_that_draws_take_its_noise_away(name: str) -> None:
    """Whole and parts drop other activations: compared as they are, a number would fit no rule, or a wrong one."""
    assert not run(Measured(JOINED[name], every=2, dropout=0.3), 3)[1]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.long
def test_looks_leave_no_trace(accumulate: int) -> None:
    """Weights and random numbers are those of a run that logs nothing beside its loss."""
    weights = []
    for every in (100, 1):
        module = Measured(JOINED["the largest"], every=every, dropout=0.3)
        run(module, 3, accumulate_grad_batches=accumulate)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))
    assert torch.equal(*weights)


def test_a_step_that_differentiates_is_looked_at_with_gradients() -> None:
    def slope(x: Tensor, y: Tensor) -> Tensor:
        leaf = x.clone().requires_grad_(True)
        return torch.autograd.grad(leaf.square().sum(), leaf)[0].mean()  # fails under no_grad

    wanted, _ = run(Measured(slope, every=3), None)
    found, warned = run(Measured(slope, every=3), 3)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert not warned


def by_rows(batch: list[Tensor], sizes: Any) -> list[Any]:
    """A split of the user's own: no rows are picked from such a batch, neighbours are run as one."""
    return [list(part) for part in zip(*(tensor.split(list(sizes)) for tensor in batch), strict=True)]


@pytest.mark.parametrize("name", ["a mean over rows", "a mean over labels", "a sum", "the largest"])
def test_neighbours_tell_where_the_user_splits(name: str) -> None:
    wanted, _ = run(Measured(JOINED[name], every=2), None)
    found, warned = run(Measured(JOINED[name], every=2), 3, split=by_rows)
    assert found == pytest.approx(wanted, rel=1e-5, nan_ok=True)
    assert not warned


class Noisy(Measured):
    """Draws a number of Python, which is the same for all parts."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        random.random()
        forwards.append(batch_idx)
        return super().training_step(batch, batch_idx)


forwards: list[int] = []  # not the module's own: trials would put it back


@pytest.mark.long
def test_a_step_that_always_draws_is_not_looked_at_for_ever() -> None:
    ran = []
    for epochs in (
        9,
        13,
    ):  # the loss is compared again after 64 and 128 batches, before and after these epochs
        forwards.clear()
        run(Noisy(JOINED["a number of Python"]), 3, max_epochs=epochs, max_steps=-1)
        ran.append(len(forwards))
    assert ran[1] - ran[0] == 4 * BATCHES * 3  # three parts a batch


def test_the_users_batch_size_is_taken_at_its_word_where_nothing_can_tell() -> None:
    class Said(Noisy):
        def log(self, name: str, value: Any, **options: Any) -> None:
            super().log(name, value, batch_size=self.rows, **options)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            self.rows = len(batch[0])
            return super().training_step(batch, batch_idx)

    wanted, _ = run(Said(JOINED["a number of Python"], every=4), None)
    found, warned = run(Said(JOINED["a number of Python"], every=4), 3)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert not warned
    # Without it, two micro-batches run as one tell: all of them draw the same number.
    found, warned = run(Noisy(JOINED["a number of Python"], every=4), 3)
    assert found == pytest.approx(run(Noisy(JOINED["a number of Python"], every=4), None)[0], rel=1e-5)
    assert not warned

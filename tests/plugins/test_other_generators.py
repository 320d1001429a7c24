"""Numbers that a step draws from Python's or NumPy's generators: drawn as the whole batch would draw them."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from tests.plugins.toys import trainer, weights

OUTSIDE = [np.random.default_rng(3)]  # which no trial can know


class Mixup(LightningModule):
    """A mixture of two losses, weighed by one number a batch."""

    def __init__(self, draw: Callable[["Mixup", Tensor, int], float]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.draw = draw
        self.own, self.several = np.random.default_rng(5), (random.Random(7),)
        self.losses: list[float] = []
        self.after: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        share, scores = self.draw(self, x, batch_idx), self.net(x)
        return share * F.cross_entropy(scores, y) + (1 - share) * F.cross_entropy(scores, (y + 1) % 4)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.after.append(random.random() + float(np.random.rand()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(draw: Any, *callbacks: Any) -> Mixup:
    torch.manual_seed(0)
    random.seed(1)
    np.random.seed(2)
    OUTSIDE[0] = np.random.default_rng(3)
    module = Mixup(draw).double()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(44, 6, generator=generator, dtype=torch.float64)
    data: Any = list(zip(x, torch.randint(0, 4, (44,), generator=generator), strict=True))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*many workers.*")
        trainer(*callbacks, max_epochs=1, max_steps=-1).fit(module, DataLoader(data, batch_size=8))
    return module


def coin(module: Mixup, x: Tensor, batch_idx: int) -> float:
    return 0.8 if random.random() < 0.5 else 0.1


ONCE: dict[str, Any] = {
    "NumPy's": lambda module, x, batch_idx: float(np.random.beta(1, 1)),
    "Python's": lambda module, x, batch_idx: random.betavariate(1, 1),
    "a coin": coin,
    "the module's": lambda module, x, batch_idx: float(module.own.beta(1, 1)),
    "one of several": lambda module, x, batch_idx: module.several[0].random(),
    "from a later batch on": lambda module, x, batch_idx: random.random() if batch_idx > 3 else 0.5,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("draw", ONCE.values(), ids=ONCE)
@pytest.mark.parametrize("size", [1, 3])
def test_every_micro_batch_draws_what_its_batch_would(draw: Any, size: int) -> None:
    whole, split = fitted(draw), fitted(draw, MemoryBudget("1GiB", micro_batch_size=size, within="step"))
    torch.testing.assert_close(weights(split), weights(whole), rtol=1e-12, atol=1e-13)
    assert split.losses == pytest.approx(whole.losses, rel=1e-12)
    assert split.after == whole.after  # what is drawn next is the same, too


BY_ROWS: dict[str, Any] = {
    "one a row": lambda module, x, batch_idx: float(np.random.rand(len(x)).mean()),
    "one a row, unused": lambda module, x, batch_idx: 0.5 + 0 * float(np.random.rand(len(x)).mean()),
    "one a row of the module's": lambda module, x, batch_idx: float(module.own.random(len(x)).mean()),
}


@pytest.mark.parametrize("draw", BY_ROWS.values(), ids=BY_ROWS)
def test_draws_for_each_row_run_whole(draw: Any) -> None:
    whole = fitted(draw)
    with pytest.warns(UserWarning, match="runs batches whole, .* random numbers of its own"):
        split = fitted(draw, MemoryBudget("1GiB", micro_batch_size=3, within="step"))
    assert torch.equal(weights(split), weights(whole))


def test_draws_that_depend_on_rows_from_a_later_batch_on_run_whole_from_there() -> None:
    def draw(module: Mixup, x: Tensor, batch_idx: int) -> float:
        share = random.random()
        return share if batch_idx < 4 else float(np.mean([random.random() for _ in range(len(x))]))

    whole = fitted(draw)
    with pytest.warns(UserWarning, match="more often for some rows|random numbers of its own"):
        split = fitted(draw, MemoryBudget("1GiB", micro_batch_size=3, within="step"))
    torch.testing.assert_close(weights(split), weights(whole), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.long
def test_a_draw_of_one_row_in_the_midst_of_a_later_batch_is_noticed(size: int) -> None:
    """Draws that no trial has seen are looked for after the first micro-batch and after the last."""
    marked = torch.randn(44, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)[8 * 4 + 4, 0]

    def draw(module: Mixup, x: Tensor, batch_idx: int) -> float:
        return float(np.random.rand()) if (x[:, 0] == marked).any() else 0.5

    whole, split = fitted(draw), fitted(draw, MemoryBudget("1GiB", micro_batch_size=size))
    torch.testing.assert_close(weights(split), weights(whole), rtol=1e-12, atol=1e-13)
    assert split.losses == pytest.approx(whole.losses, rel=1e-12)
    assert split.after == whole.after


def test_a_generator_that_no_trial_can_know_runs_whole() -> None:
    with pytest.warns(UserWarning, match="runs batches whole, .* random numbers of its own"):
        fitted(
            lambda module, x, batch_idx: float(OUTSIDE[0].beta(1, 1)),
            MemoryBudget("1GiB", micro_batch_size=3, within="step"),
        )


def test_weigh_by_splits_and_says_that_each_micro_batch_draws() -> None:
    with pytest.warns(UserWarning, match="each micro-batch draws numbers of its own"):
        fitted(BY_ROWS["one a row"], MemoryBudget("1GiB", micro_batch_size=3, weigh_by="samples"))


class Noisy(LightningModule):
    """Adds noise to its rows that it draws from a generator of torch's of its own; counts the rows of each forward."""

    def __init__(self, draw: Callable[[Tensor, torch.Generator], Tensor]) -> None:
        super().__init__()
        self.net, self.draw = nn.Linear(6, 4), draw
        self.own = torch.Generator().manual_seed(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        ROWS.append(len(x))
        return F.cross_entropy(self.net(x + self.draw(x, self.own)), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


ROWS: list[int] = []


def noisy(draw: Any, *callbacks: Any) -> Noisy:
    torch.manual_seed(0)
    module = Noisy(draw).double()
    x, y = torch.randn(32, 6, dtype=torch.float64), torch.randint(0, 4, (32,))
    data: Any = list(zip(x, y, strict=True))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*many workers.*")
        trainer(*callbacks, max_epochs=1, max_steps=-1).fit(module, DataLoader(data, batch_size=8))
    return module


@pytest.mark.parametrize(
    "draw",
    [
        lambda x, own: torch.randn(x.shape, generator=own, dtype=x.dtype),
        lambda x, own: torch.empty_like(x).normal_(generator=own),
    ],
)
def test_noise_for_each_row_of_an_own_generator_of_torch_s_is_split(draw: Any) -> None:
    module = noisy(draw, MemoryBudget("1GiB", micro_batch_size=3, within="step"))
    assert ROWS[-3:] == [3, 3, 2]
    drawn = torch.Generator().manual_seed(3)
    for _ in range(4):
        for rows in (3, 3, 2):  # trials and looks have drawn nothing
            draw(torch.empty(rows, 6, dtype=torch.float64), drawn)
    assert torch.equal(module.own.get_state(), drawn.get_state())


def test_one_number_for_all_rows_of_an_own_generator_of_torch_s_runs_whole() -> None:
    def draw(x: Tensor, own: torch.Generator) -> Tensor:
        return torch.rand((), generator=own, dtype=x.dtype)

    whole = noisy(draw)
    with pytest.warns(UserWarning, match="runs batches whole, .* random numbers of its own"):
        split = noisy(draw, MemoryBudget("1GiB", micro_batch_size=3, within="step"))
    assert torch.equal(weights(split), weights(whole))

"""The loss that a run reports where its terms weigh unlike amounts: with all that has no gradient, and never nan."""

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

STEPS, ROWS = 4, 8
Main = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # of log probabilities, targets and a mask that few rows have


def entropy(targets: Tensor) -> Tensor:
    """Has no gradient; without it a divergence is a cross entropy."""
    return (targets * targets.log()).sum(-1)


def cross(logp: Tensor, targets: Tensor) -> Tensor:
    return -(targets * logp).sum(-1)


def clamped(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)


def labels(logp: Tensor, mask: Tensor) -> Tensor:
    """A mean over the rows that a mask leaves, of which torch tells the divisor."""
    return F.nll_loss(logp, torch.where(mask > 0, 1, -100))


BESIDE: dict[str, Main] = {
    "a constant": lambda logp, t, m: cross(logp, t).mean() + 0.5,
    "two sums over rows": lambda logp, t, m: entropy(t).sum() / len(t) + cross(logp, t).sum() / len(t),
    "a mean of two rows each": lambda logp, t, m: (entropy(t) + cross(logp, t)).mean(),
    "torch's divergence": lambda logp, t, m: F.kl_div(logp, t, reduction="batchmean"),
    "torch's divergence by row": lambda logp, t, m: F.kl_div(logp, t, reduction="none").sum(-1).mean(),
}
ALONE: dict[str, Main] = {
    "clamped, and a constant": lambda logp, t, m: clamped(logp.abs().sum(-1), m) + 0.5,
    "clamped twice, and a constant": lambda logp, t, m: (
        0.5 + clamped(entropy(t), m) + clamped(cross(logp, t), m)
    ),
    "clamped, between constants": lambda logp, t, m: 2 - (0.5 + clamped(cross(logp, t), m)),
}


def with_mask(main: Main) -> Main:
    """A second mean, over the rows that a mask leaves: nan where it leaves none."""
    return lambda logp, t, m: main(logp, t, m) + 0.1 * ((logp.square().sum(-1) * m).sum() / m.sum())


def with_mask_first(main: Main) -> Main:
    """What has no gradient is added to a sum of two terms."""
    return lambda logp, t, m: 0.1 * (cross(logp, t) * m).sum() / m.sum() + main(logp, t, m) + 0.25


# What has no gradient is divided by something else than what it is added to.
UNLIKE: dict[str, Main] = {
    "labels, and a mean over rows": lambda logp, t, m: labels(logp, m) + entropy(t).mean(),
    "labels, and a mean over labels": lambda logp, t, m: labels(logp, m) + (entropy(t) * m).sum() / m.sum(),
    "a sum, and a constant": lambda logp, t, m: cross(logp, t).sum() + 3,
    "a sum, and a mean over rows": lambda logp, t, m: cross(logp, t).sum() - entropy(t).mean(),
    "a mean, and a sum": lambda logp, t, m: cross(logp, t).mean() + entropy(t).sum(),
    "a mean over rows, and one over labels": lambda logp, t, m: (
        cross(logp, t).mean() + (entropy(t) * m).sum() / m.sum() + 0.1 * labels(logp, m)
    ),
    "labels that are smoothed, and a mean over others": lambda logp, t, m: (
        F.cross_entropy(logp, t.argmax(-1), label_smoothing=0.1) + labels(logp, m)
    ),
    "labels that are smoothed, and a constant": lambda logp, t, m: (
        2 - F.cross_entropy(logp, t.argmax(-1), label_smoothing=0.1) + labels(logp, m)
    ),
    "two, and their own beside each": lambda logp, t, m: (
        (cross(logp, t).mean() + (entropy(t) * m).sum() / m.sum()) + (labels(logp, m) + entropy(t).mean())
    ),
}
CASES = {f"{name}, and a masked mean": with_mask(main) for name, main in BESIDE.items()}
CASES |= {f"a masked mean and {name}": with_mask_first(main) for name, main in BESIDE.items()}
CASES |= ALONE


class Reporting(LightningModule):
    def __init__(self, main: Main) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.main = nn.Linear(4, 3).double(), main
        self.seen: list[list[float]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logp = self.net(batch["x"]).log_softmax(-1)
        loss = self.main(logp, batch["t"], batch["m"])
        self.log("loss", loss)
        self.log("same", loss * 1)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        logged = self.trainer.callback_metrics
        self.seen.append([float(outputs["loss"]), float(logged["loss"]), float(logged["same"])])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows(every: int, first: int = 1) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    data = [
        {
            "x": torch.randn(4, generator=generator).double(),
            "t": torch.rand(3, generator=generator).double().softmax(0),
            "m": torch.tensor(float(index % every < first)).double(),
        }
        for index in range(STEPS * ROWS)
    ]
    return DataLoader(data, batch_size=ROWS)  # pyright: ignore[reportArgumentType]


@pytest.mark.sampled(17)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("every", [1, 4], ids=["all rows", "few rows"])
@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_that_of_the_whole_batch(case: str, every: int, size: int) -> None:
    runs = []
    for callbacks in ([], [MemoryBudget("1GiB", micro_batch_size=size)]):
        module = Reporting(CASES[case])
        trainer(*callbacks, max_steps=STEPS, enable_progress_bar=False).fit(module, rows(every))
        runs.append((module.seen, module.net.weight.detach()))
    (seen, weight), (seen_in_parts, weight_of_parts) = runs
    assert torch.tensor(seen_in_parts).sub(torch.tensor(seen)).abs().max() <= 1e-6  # logged in float32
    assert weight_of_parts.sub(weight).abs().max() <= 1e-12


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "main", [BESIDE["a constant"], ALONE["clamped, and a constant"]], ids=["mean", "clamped"]
)
def test_a_loss_of_one_dimension_is_a_number(main: Main, size: int) -> None:
    """Its only entry is no row of the batch."""
    runs = []
    for callbacks in ([], [MemoryBudget("1GiB", micro_batch_size=size)]):
        module = Reporting(lambda logp, t, m: main(logp, t, m).reshape(1))
        trainer(*callbacks, max_steps=STEPS, enable_progress_bar=False).fit(module, rows(4))
        runs.append(torch.tensor(module.seen))
    assert runs[1].sub(runs[0]).abs().max() <= 1e-6


@pytest.mark.parametrize("case", UNLIKE)
@pytest.mark.long
def test_what_has_no_gradient_may_be_divided_by_something_else(case: str) -> None:
    runs = []
    for callbacks in ([], [MemoryBudget("1GiB", micro_batch_size=3)]):
        module = Reporting(UNLIKE[case])
        trainer(*callbacks, max_steps=STEPS, enable_progress_bar=False).fit(module, rows(3, 2))
        runs.append(torch.tensor(module.seen))
    assert runs[1].sub(runs[0]).abs().max() <= 2e-6 * runs[0].abs().max()


@pytest.mark.parametrize("size", [1, 3])
def test_a_number_of_which_nothing_can_be_told_is_named(size: int) -> None:
    """It is a mean by weights that the loss does not show; or by rows, of which some have a loss of nothing."""

    def weighed(logp: Tensor, t: Tensor, m: Tensor) -> Tensor:
        return labels(logp, m) + (entropy(t) * t[:, 0]).sum() / t[:, 0].sum()

    module = Reporting(weighed)
    with pytest.warns(UserWarning, match="A part of the loss has no gradient"):
        trainer(MemoryBudget("1GiB", micro_batch_size=size), max_steps=STEPS, enable_progress_bar=False).fit(
            module, rows(3, 2)
        )


@pytest.mark.parametrize("every", [4, 8])
def test_a_number_that_differs_among_rows_is_named_where_no_rows_were_compared_whole(every: int) -> None:
    """Beside smoothed labels it can't be read of a micro-batch without a label, and each comparison has such."""

    def smoothed(logp: Tensor, t: Tensor, m: Tensor) -> Tensor:
        chosen = torch.where(m > 0, t.argmax(-1), -100)
        return F.cross_entropy(logp, chosen, label_smoothing=0.1) + entropy(t).mean()

    runs, names = [], "A part of the loss has no gradient"
    for callbacks in ([], [MemoryBudget("1GiB", micro_batch_size=1)]):
        module = Reporting(smoothed)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer(*callbacks, max_steps=STEPS, enable_progress_bar=False).fit(module, rows(every))
        runs.append(torch.tensor(module.seen))
    is_whole = bool(runs[1].sub(runs[0]).abs().max() <= 2e-6 * runs[0].abs().max())
    assert is_whole or any(names in str(one.message) for one in said)

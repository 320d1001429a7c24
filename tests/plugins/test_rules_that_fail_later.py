"""Logged and returned numbers whose rule holds in the first batches only; losses of several terms that share rows."""

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
from tests.plugins.toys import trainer, weights

Batch = dict[str, Tensor]


class Net(LightningModule):
    """Scores of four classes at five places of each row; `m` keeps most places in the first batches, few later."""

    def __init__(self, step: Callable[["Net", Batch, Tensor], Any]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.step = step
        self.outputs: list[dict[str, float]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        scores = self.net(batch["x"])
        losses = F.cross_entropy(scores.transpose(1, 2), batch["y"], reduction="none")
        return self.step(self, batch, losses)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        numbers = {name: float(value) for name, value in outputs.items()}
        logged = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.outputs.append({**numbers, **logged})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(kept: float) -> DataLoader:
    data: list[Batch] = []
    for index, rows in enumerate((8, 8, 8, 8, 5)):
        generator = torch.Generator().manual_seed(index)
        mask = (torch.rand(rows, 5, generator=generator) < (kept if index < 3 else 0.12)).double()
        x = torch.randn(rows, 5, 6, generator=generator, dtype=torch.float64)
        data.append({"x": x, "y": torch.randint(0, 4, (rows, 5), generator=generator), "m": mask})
    return DataLoader(data, batch_size=None)  # pyright: ignore[reportArgumentType]


def fitted(step: Any, *callbacks: Any, kept: float = 0.8) -> tuple[Net, dict[str, float]]:
    torch.manual_seed(0)
    module = Net(step).double()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*many workers.*")
        fit = trainer(*callbacks, max_epochs=1, max_steps=-1)
        fit.fit(module, batches(kept))
    return module, {name: float(value) for name, value in fit.callback_metrics.items()}


def assert_same(step: Any, size: int, **options: Any) -> None:
    whole, of_epoch = fitted(step, **options)
    split, of_epoch_split = fitted(step, MemoryBudget("1GiB", micro_batch_size=size), **options)
    torch.testing.assert_close(weights(split), weights(whole), rtol=1e-12, atol=1e-13)
    for ours, theirs in zip(split.outputs, whole.outputs, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10)
    assert of_epoch_split == pytest.approx(of_epoch, rel=1e-10)


def kept_mean(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def row_means(losses: Tensor, mask: Tensor) -> Tensor:
    return ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


SHARED: dict[str, Any] = {
    "two sums over one count": lambda m, b, l: {  # noqa: E741
        "loss": kept_mean(l, b["m"]) + 0.1 * (l * (1 - b["m"])).sum() / b["m"].sum().clamp(min=1)
    },
    "tokens and rows": lambda m, b, l: {"loss": kept_mean(l, b["m"]) + row_means(l, b["m"])},  # noqa: E741
    "two masks": lambda m, b, l: {  # noqa: E741
        "loss": kept_mean(l, b["m"]) + 0.5 * (l * (b["y"] > 1)).sum() / (b["y"] > 1).sum().clamp(min=1)
    },
    "all and some": lambda m, b, l: {"loss": l.mean() + kept_mean(l, b["m"])},  # noqa: E741
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("step", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.long
def test_terms_that_share_their_rows_are_weighed_and_reported_one_by_one(step: Any, size: int) -> None:
    assert_same(step, size)


def number_of_kept(module: Net, batch: Batch, losses: Tensor) -> Any:
    count = max(1, int(batch["m"].sum()))
    return {"loss": losses.mean(), "n": count}


def mean_of_kept(module: Net, batch: Batch, losses: Tensor) -> Any:
    return {"loss": losses.mean(), "kept": losses.detach()[batch["m"] > 0].mean()}


def background_per_kept(module: Net, batch: Batch, losses: Tensor) -> Any:
    back = (losses * (1 - batch["m"])).sum() / batch["m"].sum().clamp(min=1)
    return {"loss": kept_mean(losses, batch["m"]) + back, "back": back.detach()}


@pytest.mark.parametrize(
    ("step", "name", "kept", "size"),
    [
        (number_of_kept, "n", 0.8, 1),
        (number_of_kept, "n", 0.8, 3),
        (mean_of_kept, "kept", 1.1, 1),
        (mean_of_kept, "kept", 1.1, 3),
        (background_per_kept, "back", 0.8, 1),
    ],
)
def test_a_returned_number_whose_rule_fails_in_a_later_batch_is_named(
    step: Any, name: str, kept: float, size: int
) -> None:
    whole, _ = fitted(step, kept=kept)
    with pytest.warns(UserWarning, match=f"returns as '{name}' can't be made"):
        split, _ = fitted(step, MemoryBudget("1GiB", micro_batch_size=size), kept=kept)
    torch.testing.assert_close(weights(split), weights(whole), rtol=1e-12, atol=1e-13)


def test_a_returned_number_whose_rule_holds_in_all_micro_batches_is_the_batch_s() -> None:
    """Of three rows each keeps some place, so that no divisor is clamped."""
    assert_same(background_per_kept, 3)


def logs_mean_of_kept(module: Net, batch: Batch, losses: Tensor) -> Any:
    module.log("kept", losses.detach()[batch["m"] > 0].mean())
    return {"loss": losses.mean()}


def logs_number_of_kept(module: Net, batch: Batch, losses: Tensor) -> Any:
    module.log("kept", batch["m"].sum().clamp(min=1), reduce_fx="sum")
    return {"loss": losses.mean()}


@pytest.mark.parametrize("step", [logs_mean_of_kept, logs_number_of_kept])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_a_logged_number_whose_rule_fails_in_a_later_batch_is_named(step: Any, size: int) -> None:
    with pytest.warns(UserWarning, match="logs as 'kept' can't be made"):
        fitted(step, MemoryBudget("1GiB", micro_batch_size=size), kept=1.1)


def logs_what_adds_up(module: Net, batch: Batch, losses: Tensor) -> Any:
    module.log("mean", losses.detach().mean(), batch_size=len(losses))
    module.log("count", batch["m"].sum(), reduce_fx="sum")
    return {"loss": losses.mean(), "count": int(batch["m"].sum()), "most": losses.detach().max()}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_a_rule_that_holds_in_a_later_batch_is_not_doubted(size: int) -> None:
    assert_same(logs_what_adds_up, size, kept=1.1)


def one_by_batch(module: Net, batch: Batch, losses: Tensor) -> Any:
    share = max(0.0, 1 - 0.15 * module.global_step)
    loss = share * kept_mean(losses, batch["m"]) + (1 - share) * losses.square().mean()
    module.log("loss_of_epoch", loss, on_step=True, on_epoch=True, batch_size=1)
    return {"loss": loss}


def seven_by_batch(module: Net, batch: Batch, losses: Tensor) -> Any:
    loss = kept_mean(losses, batch["m"]) + losses.mean()
    module.log("loss_of_epoch", loss, on_step=False, on_epoch=True, batch_size=7)
    return {"loss": loss}


@pytest.mark.parametrize("step", [one_by_batch, seven_by_batch])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.long
def test_a_constant_batch_size_counts_a_batch_once_however_it_is_split(step: Any, size: int) -> None:
    assert_same(step, size)


def positives(module: Net, batch: Batch, losses: Tensor) -> Any:
    """A second mean, which is there only if rows count in it."""
    kept = batch["m"] > 0
    return {"loss": losses.mean() + losses[kept].square().mean() if kept.any() else losses.mean()}


def by_image(module: Net, batch: Batch, losses: Tensor) -> Any:
    kept = [row[mask > 0].mean() for row, mask in zip(losses, batch["m"], strict=True) if mask.any()]
    return {"loss": sum(kept) / len(kept) if kept else losses.sum() * 0}


def by_image_over_all(module: Net, batch: Batch, losses: Tensor) -> Any:
    """Divided by all rows, also by those that a micro-batch without positives does not show."""
    kept = [row[mask > 0].mean() for row, mask in zip(losses, batch["m"], strict=True) if mask.any()]
    return {"loss": sum(kept) / len(losses) if kept else losses.sum() * 0}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("step", [positives, by_image, by_image_over_all])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.long
def test_a_term_that_a_micro_batch_lacks_counts_nothing_in_it(step: Any, size: int) -> None:
    assert_same(step, size)

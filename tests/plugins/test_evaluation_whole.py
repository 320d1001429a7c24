"""Evaluation batches that do not fit and that micro-batches would change: they run whole, and a warning says why."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_memkit.micro_batching.options import BudgetOptions
from tests.plugins.test_evaluation import (
    PLENTY,
    Wide,
    assert_close,
    assert_same,
    evaluated,
    in_parts,
    late_labels,
    peak_of,
)
from tests.plugins.toys import loader


class Contrastive(Wide):
    """A loss that compares a batch's samples with each other."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        rows = F.normalize(self.linear(batch["x"] / 50), dim=1)
        self.log("loss", F.cross_entropy(rows @ rows.T, torch.arange(len(rows))))


class Picky(Wide):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.rows(batch["x"])
        if len(batch["x"]) % 4:
            raise ValueError("rows come in fours")


class InTraining(Wide):
    """Batch statistics, kept in training mode by the user."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(12)

    def on_validation_model_eval(self) -> None:
        self.train()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("loss", self.linear(self.norm(batch["x"] / 50)).square().mean())


class Scalar(Wide):
    """Returns its loss, as Lightning's own examples do."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.sizes.seen.append(len(batch["x"]))
        return self.rows(batch["x"]).mean()


class Keeping(Wide):
    """What each batch adds to its module; micro-batches would add it more than once, or in other portions."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = self.start()

    def start(self) -> Any:
        return []

    def keep(self, rows: Tensor) -> None:
        self.kept.append(rows.mean())

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.keep(self.rows(batch["x"]))

    def on_validation_epoch_end(self) -> None:
        kept = self.kept
        self.log("kept", torch.stack([torch.as_tensor(item).float().sum() for item in kept]).mean())


class Rows(Keeping):
    """Hooks may join rows, or count the batches: which, is not known."""

    def keep(self, rows: Tensor) -> None:
        self.kept.append(rows)


class Counting(Keeping):
    def start(self) -> Any:
        return {"batches": 0}

    def keep(self, rows: Tensor) -> None:
        self.kept["batches"] += 1

    def on_validation_epoch_end(self) -> None:
        self.log("batches", float(self.kept["batches"]))


class MeanOfLosses(Keeping):
    """A metric that weighs each of its updates alike."""

    def start(self) -> Any:
        return MeanMetric()

    def keep(self, rows: Tensor) -> None:
        self.kept(rows.mean())

    def on_validation_epoch_end(self) -> None:
        self.log("mean of losses", self.kept)


class OnStep(Wide):
    """Its metric object shows the last update's value after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = SumMetric()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.metric(self.rows(batch["x"]))
        self.log("sum", self.metric, on_step=True, on_epoch=True)


class Noisy(Wide):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("noise", (self.rows(batch["x"]) + torch.randn(len(batch["x"]))).mean())


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Contrastive, r"what it logs can't be told from micro-batches: loss.* samples at once"),
        (Picky, r"it fails on a few samples \(ValueError: rows come in fours\)"),
        (InTraining, r"exceeds the budget's usable"),
        (Scalar, r"what it returns would have to be joined"),
        (Keeping, r"micro-batches would leave kept \(container\) otherwise"),
        (Rows, r"micro-batches would leave kept \(container\) otherwise"),
        (Counting, r"micro-batches would leave kept \(container\) otherwise"),
        (MeanOfLosses, r"micro-batches would leave kept \(metric\) otherwise"),
        (OnStep, r"it logs 'sum' on_step, a metric that would show its last micro-batch alone"),
        (Noisy, r"it draws random numbers, and micro-batches draw others"),
    ],
)
def test_a_step_that_parts_would_change_runs_whole(module: type[LightningModule], words: str) -> None:
    whole, first, plain = evaluated("validate", None, module)
    budget = BudgetOptions(budget_bytes=peak_of(module, 4), headroom=0.0)
    with pytest.warns(UserWarning, match=words) as caught:
        parts, other, quiet = evaluated("validate", budget, module)
    told = [str(one.message) for one in caught if "runs its batches of 8 samples whole" in str(one.message)]
    assert len(told) == 1
    assert "Use a smaller batch_size in dataloader 0" in told[0]
    assert_same(parts, whole)
    assert_same(dict(quiet.callback_metrics), dict(plain.callback_metrics))
    torch.testing.assert_close(other.state_dict(), first.state_dict(), rtol=0, atol=0)


def test_a_whole_batch_that_runs_out_of_memory_says_why_it_is_whole_and_what_helps() -> None:
    class Full(Contrastive):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            if batch_idx == 2:
                raise torch.OutOfMemoryError("the device is full")
            super().validation_step(batch, batch_idx)

    words = r"device is full\) and can't be split: what it logs .* Use a smaller batch_size in dataloader 0; or return"
    for recover in (True, False):
        budget = BudgetOptions(budget_bytes=peak_of(Full, 4), headroom=0.0, recover=recover)
        with (
            pytest.warns(UserWarning, match="samples whole"),
            pytest.raises(torch.OutOfMemoryError, match=words),
        ):
            evaluated("validate", budget, Full)


def test_predictions_that_run_out_of_memory_are_not_split_and_the_error_names_what_helps() -> None:
    class Full(Wide):
        def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise torch.OutOfMemoryError("the device is full")
            return self.rows(batch["x"])

    with (
        pytest.warns(UserWarning, match="predictions are never split"),
        pytest.raises(
            torch.OutOfMemoryError, match=r"can't be split.* Use a smaller batch_size in dataloader 0"
        ),
    ):
        evaluated("predict", BudgetOptions(budget_bytes=PLENTY), Full)


def test_a_batch_that_can_not_be_split_runs_whole() -> None:
    rows = [{"x": torch.ones(8, 12), "mask": torch.ones(3)} for _ in range(2)]
    data = DataLoader(rows, batch_size=None)  # pyright: ignore[reportArgumentType]
    _, module, _ = evaluated("validate", BudgetOptions(budget_bytes=PLENTY), Scalar, data)
    assert module.sizes.seen == [8, 8, 8]
    with pytest.warns(UserWarning, match="runs its batches whole, .* disagree on the leading size"):
        _, module, _ = evaluated("validate", BudgetOptions(budget_bytes=60_000), Scalar, data)
    assert module.sizes.seen == [8, 8, 8]


def test_longer_samples_that_can_not_be_split_run_whole_from_then_on() -> None:
    """The budget counts them as they run; what the device holds all the same is no OOM."""

    class Long(Scalar):
        def rows(self, x: Tensor) -> Tensor:
            return super().rows(x.unfold(1, 12, 12))

    rows = [{"x": torch.ones(12 if i < 8 else 48, dtype=torch.int64)} for i in range(24)]
    data = DataLoader(rows, batch_size=8)  # pyright: ignore[reportArgumentType]
    with pytest.warns(UserWarning, match="returns would have to be joined"):
        _, module, _ = evaluated("validate", BudgetOptions(budget_bytes=140_000, headroom=0.0), Long, data)
    assert module.sizes.seen[-2:] == [8, 8]


class Late(Wide):
    """Changes its ways in its third batch."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.sizes.seen.append(len(batch["x"]))
        mean = self.rows(batch["x"]).mean()
        self.log("mean", mean)
        return self.late(batch, mean) if batch_idx == 2 else None

    def late(self, batch: dict[str, Tensor], mean: Tensor) -> Any:
        return mean


class LateSpread(Late):
    def late(self, batch: dict[str, Tensor], mean: Tensor) -> Any:
        self.log("spread", batch["x"].float().std())


@pytest.mark.parametrize("module", [Late, LateSpread])
def test_what_only_a_later_batch_shows_lets_it_run_again_whole(module: type[LightningModule]) -> None:
    whole, _, _ = evaluated("validate", None, module)
    with pytest.warns(UserWarning, match="runs its batches of 8 samples whole"):
        parts, other, _ = evaluated("validate", in_parts(3, module), module)
    assert_close(parts, whole)
    assert other.sizes.seen[-2:] == [8, 4]


def test_a_metric_that_only_a_later_batch_would_leave_otherwise_is_compared_again() -> None:
    """Its loss is a mean over labels, which it weighs by rows: all labels count in the first batches."""

    class Weighed(Wide):
        def __init__(self) -> None:
            super().__init__()
            self.metric = MeanMetric()

        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.sizes.seen.append(len(batch["x"]))
            counts = batch["labels"] != -100
            per_row = self.rows(batch["x"]) * batch["x"][:, 0]
            mean = (per_row[:, None] * counts).sum() / counts.sum()
            self.metric.update(mean, weight=len(counts))
            self.log("mean", self.metric)

    data = late_labels()
    whole, _, _ = evaluated("validate", None, Weighed, data)
    with pytest.warns(UserWarning, match=r"micro-batches would leave metric \(metric\) otherwise"):
        parts, module, _ = evaluated("validate", in_parts(3, Weighed, data), Weighed, data)
    assert_close(parts, whole)
    assert module.sizes.seen[-1] == 8


def test_a_weighing_meant_for_training_may_not_fit_other_batches() -> None:
    def labels(batch: Any) -> float:
        return float((batch["labels"] != -100).sum())

    rows = [{"x": torch.arange(12) + i} for i in range(16)]
    data = DataLoader(rows, batch_size=8)  # pyright: ignore[reportArgumentType]
    for weigh_by in (labels, "labels"):
        whole, _, _ = evaluated("validate", None, Wide, data)
        parts, module, _ = evaluated("validate", in_parts(4, Wide, data, weigh_by=weigh_by), Wide, data)
        assert_close(parts, whole)
        assert module.sizes.seen[-2:] == [4, 4]


class InPlace(Wide):
    """Scales its batch in place, which on a CPU is the loader's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = MetricCollection({"accuracy": MulticlassAccuracy(512)})

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.sizes.seen.append(len(batch["x"]))
        batch["x"].mul_(3).add_(1)
        self.scores.update(self.linear(batch["x"] / 50), batch["x"][:, 0])
        self.log("mean", self.rows(batch["x"]).mean())
        self.log_dict(self.scores)


@pytest.mark.parametrize("size", [None, 3])
def test_trials_and_retries_give_a_batch_back_that_a_step_changes_in_place(size: int | None) -> None:
    class Fails(InPlace):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if batch_idx == 1 and len(batch["x"]) > 2 and self.fails:
                raise torch.OutOfMemoryError("the device is full")

    class Sound(Fails):
        fails = False

    class Full(Fails):
        fails = True

    options = BudgetOptions(budget_bytes=PLENTY) if size is None else in_parts(size, Sound)
    whole, _, _ = evaluated("validate", None, Sound, loader(8, count=28))
    parts, module, _ = evaluated("validate", options, Full, loader(8, count=28))
    assert max(module.sizes.seen[-6:]) <= 4
    assert_close(parts, whole)

"""Validation, test and prediction within a budget: the oracle is Lightning without it, on the unsplit batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from lightning_memkit.memory.measure import Capacity
from lightning_memkit.memory.meter import ByteMeter
from lightning_memkit.micro_batching.options import BudgetOptions
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from lightning_memkit.plugins import _predictions
from lightning_memkit.plugins._evaluation import keep_budget_in_evaluation
from lightning_memkit.plugins._evaluation_trials import bytes_of
from tests.plugins.toys import TokenTagger, loader, trainer

PLENTY = 2**30


class Everything(TokenTagger):
    """Logs, returns and gathers in every way that people do; `sizes` tells the parts that came."""

    def __init__(self) -> None:
        super().__init__()
        self.mean_of_losses = MeanMetric()
        auroc = MulticlassAUROC(50, thresholds=20, ignore_index=-100)
        metrics: Any = {"accuracy": MulticlassAccuracy(50, ignore_index=-100), "auroc": auroc}
        self.metrics_of_tokens = MetricCollection(metrics)
        self.losses: list[Tensor] = []
        self.rows: list[Tensor] = []
        self.batches = 0
        self.totals = {"loss": torch.zeros(())}
        self.sizes = Seen()
        self.ends: list[Any] = []

    def evaluate(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        self.sizes.seen.append(len(batch["x"]))
        logits = self.head(self.mix(self.embedding(batch["x"]))[0])
        labels = batch["labels"].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), labels)
        self.mean_of_losses(loss)
        self.metrics_of_tokens.update(logits.flatten(0, 1), labels)
        self.losses.append(loss)
        self.rows.append(logits.argmax(-1))
        self.batches += 1
        self.totals["loss"] += loss
        counted = (batch["labels"] != -100).sum()
        texts = [str(int(row.sum())) for row in batch["x"]]
        if not self.trainer.predicting:
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log("own count", loss, batch_size=int(counted))
            self.log("mean_x", batch["x"].float().mean())
            self.log("labels", counted.float(), reduce_fx="sum")
            self.log("largest", logits.max(), reduce_fx="max")
            self.log("largest, averaged", logits.max())
            self.log("mean of losses", self.mean_of_losses, on_step=False, on_epoch=True)
            self.log_dict(self.metrics_of_tokens, on_step=False, on_epoch=True)
            if batch_idx % 2:
                self.log("odd", loss)
        return {
            "loss": loss,
            "logits": logits,
            "counted": counted,
            "texts": texts,
            "flat": logits.flatten(0, 1),
        }

    validation_step = test_step = predict_step = evaluate

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.ends.append(outputs)

    def on_validation_epoch_end(self) -> None:
        self.log("gathered losses", torch.stack(self.losses).mean())
        self.log("gathered rows", torch.cat(self.rows).float().mean())
        self.log("counted batches", float(self.batches))
        self.log("total", self.totals["loss"].clone())


SEEN: list[list[int]] = []


class Seen:
    """Sizes that reached the step, in trials too: kept by this file, since a trial puts back a module's objects."""

    def __init__(self) -> None:
        self.index = len(SEEN)
        SEEN.append([])

    @property
    def seen(self) -> list[int]:
        return SEEN[self.index]


def evaluated(
    run: str,
    options: BudgetOptions | None,
    module: Callable[[], LightningModule] = Everything,
    data: Any = None,
) -> tuple[Any, Any, Trainer]:
    """What a loop returns, its module and its trainer; without options it is Lightning alone."""
    torch.manual_seed(0)
    built = module()
    quiet = trainer()
    undo = keep_budget_in_evaluation(quiet, options) if options else lambda: None
    quiet_result: dict[str, Any] = {} if run == "predict" else {"verbose": False}
    data = loader(8, count=28) if data is None else data
    try:
        return getattr(quiet, run)(built, data, **quiet_result), built, quiet
    finally:
        undo()


def assert_close(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_close(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_close(one, other)
    elif isinstance(a, Tensor):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
    else:
        assert a == pytest.approx(b, rel=2e-6) if isinstance(a, float) else a == b


def in_parts(size: int = 3, **options: Any) -> BudgetOptions:
    return BudgetOptions(**{"budget_bytes": PLENTY, "micro_batch_size": size, **options})


# The unsplit batch's results


@pytest.mark.parametrize("run", ["validate", "test"])
@pytest.mark.parametrize("size", [1, 3])
def test_logged_values_are_the_unsplit_batch_s(run: str, size: int) -> None:
    whole, one, plain = evaluated(run, None)
    parts, other, split = evaluated(run, in_parts(size))
    assert max(one.sizes.seen) == 8
    assert other.sizes.seen[-1] == (1 if size == 1 else 2)  # the last batch has 4 rows
    assert_close(parts, whole)
    assert_close(dict(split.callback_metrics), dict(plain.callback_metrics))
    assert len(whole[0]) >= 10


def test_hooks_get_the_whole_batch_s_output() -> None:
    _, one, _ = evaluated("validate", None)
    _, other, _ = evaluated("validate", in_parts())
    assert len(one.ends) == 4
    assert_close(other.ends, one.ends)


def test_predictions_are_the_unsplit_batch_s() -> None:
    whole, _, _ = evaluated("predict", None)
    parts, module, _ = evaluated("predict", in_parts())
    assert_close(parts, whole)
    assert len(parts) == 4
    assert module.sizes.seen[-2:] == [2, 2]


def test_weighing_by_samples_would_differ() -> None:
    """The control: parts averaged by their rows, as a loop with a smaller batch_size has it."""
    whole, _, _ = evaluated("validate", None)
    naive, _, _ = evaluated("validate", None, data=loader(3, count=28))
    assert abs(naive[0]["loss_epoch"] - whole[0]["loss_epoch"]) > 1e-3


# Sizes


def peak_of(module: LightningModule, rows: int) -> int:
    """The bytes that some rows of a batch of 8 need without gradients, by this test's own use of a meter."""
    batch = next(iter(loader(8)))
    module.eval()
    with torch.inference_mode():
        meter = ByteMeter()
        meter.track([*module.parameters(), *module.buffers(), *batch.values()])
        with meter:
            output = module.validation_step({key: value[:rows] for key, value in batch.items()}, 0)
    return meter.peak_bytes + bytes_of(output) * (8 - rows) // rows


class Wide(LightningModule):
    """Needs many times its output's bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(12, 512)
        self.sizes = Seen()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.sizes.seen.append(len(batch["x"]))
        return self.linear(batch["x"] / 50).exp().tanh().mean(1)

    predict_step = test_step = validation_step


@pytest.mark.parametrize("run", ["validate", "test", "predict"])
def test_the_largest_part_that_fits_is_measured(run: str) -> None:
    budget = (peak_of(Wide(), 4) + peak_of(Wide(), 5)) // 2
    _, module, _ = evaluated(run, BudgetOptions(budget_bytes=budget, headroom=0.0), Wide)
    assert module.sizes.seen[-7:] == [4, 4, 4, 4, 4, 4, 4]
    _, module, _ = evaluated(run, BudgetOptions(budget_bytes=peak_of(Wide(), 4) - 1, headroom=0.0), Wide)
    assert module.sizes.seen[-5:] == [3, 3, 2, 2, 2]  # 8 rows, and the last 4


def test_a_batch_that_fits_is_lightning_s_own_affair() -> None:
    _, module, _ = evaluated("validate", BudgetOptions(budget_bytes=PLENTY), Wide)
    assert module.sizes.seen == [8, 8, 8, 8, 4]  # the first is measured before it runs


def test_where_not_even_one_sample_fits_the_error_says_by_how_much() -> None:
    with pytest.raises(
        BudgetError, match=r"part of 1 sample needs .* in validation_step, .* more .* budget=\"1MiB\""
    ):
        evaluated("validate", BudgetOptions(budget_bytes=30_000), Wide)


def test_longer_samples_are_measured_when_they_come() -> None:
    rows = [{"x": torch.ones(12 if i < 8 else 48, dtype=torch.int64)} for i in range(16)]

    class Long(Wide):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            self.sizes.seen.append(len(batch["x"]))
            return self.linear((batch["x"] / 50).unfold(1, 12, 12)).exp().tanh().mean((1, 2))

    data = DataLoader(rows, batch_size=8)  # pyright: ignore[reportArgumentType]
    budget = BudgetOptions(budget_bytes=140_000, headroom=0.0)
    whole, _, _ = evaluated("validate", None, Long, data)
    parts, module, _ = evaluated("validate", budget, Long, data)
    assert module.sizes.seen[:3] == [8, 8, 8]  # measured, run, and the longer ones begun whole
    assert max(module.sizes.seen[-2:]) <= 4
    assert parts == whole


# What can't be split


class Contrastive(Wide):
    """A loss that compares a batch's samples with each other."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.sizes.seen.append(len(batch["x"]))
        rows = F.normalize(self.linear(batch["x"] / 50), dim=1)
        loss = F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))
        self.log("loss", loss)
        return loss


class Ranked(Wide):
    """Each sample's rank among its batch."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.linear(batch["x"] / 50).mean(1).argsort().float()


class Picky(Wide):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
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


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Contrastive, r"Contrastive.validation_step runs its batches whole.* output is .* samples at once"),
        (Ranked, r"output of a few samples is not that of their parts"),
        (Picky, r"fails on a part of the batch \(ValueError: rows come in fours\)"),
        (InTraining, r"runs its batches whole"),
    ],
)
def test_a_step_that_parts_would_change_runs_whole(module: type[LightningModule], words: str) -> None:
    whole, first, _ = evaluated("validate", None, module)
    with pytest.warns(UserWarning, match=words) as caught:
        parts, other, _ = evaluated("validate", in_parts(3), module)
    assert ["runs its batches whole" in str(one.message) for one in caught].count(True) == 1
    assert parts == whole
    torch.testing.assert_close(other.state_dict(), first.state_dict(), rtol=0, atol=0)


def test_a_whole_batch_that_runs_out_of_memory_says_why_it_is_whole() -> None:
    class Full(Contrastive):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise torch.OutOfMemoryError("the device is full")
            return super().validation_step(batch, batch_idx)

    with (
        pytest.warns(UserWarning, match="whole"),
        pytest.raises(torch.OutOfMemoryError, match=r"device is full\) and can't be split: output is"),
    ):
        evaluated("validate", in_parts(3), Full)


class Generates(Wide):
    """Rows as long as the longest of them: what a language model's generate returns."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.batches += 1
        return batch["x"][:, : int(batch["x"].amax())] * 2


def test_outputs_that_are_padded_to_unequal_lengths_run_whole_from_then_on() -> None:
    rows = [{"x": torch.full((12,), 3 if i < 8 else 1 + i % 8)} for i in range(24)]
    data = DataLoader(rows, batch_size=8)  # pyright: ignore[reportArgumentType]
    whole, one, _ = evaluated("predict", None, Generates, data)
    with pytest.warns(UserWarning, match=r"output has parts of shapes \(3, 3\), \(3, 6\), \(2, 8\)"):
        parts, other, _ = evaluated("predict", in_parts(3), Generates, data)
    assert_close(parts, whole)
    assert other.batches == one.batches == 3


def test_a_weighing_meant_for_training_may_not_fit_other_batches() -> None:
    def labels(batch: Any) -> float:
        return float((batch["labels"] != -100).sum())

    rows = [{"x": torch.arange(12) + i} for i in range(16)]
    data = DataLoader(rows, batch_size=8)  # pyright: ignore[reportArgumentType]
    for weigh_by in (labels, "labels"):
        whole, _, _ = evaluated("predict", None, Wide, data)
        parts, module, _ = evaluated("predict", in_parts(4, weigh_by=weigh_by), Wide, data)
        assert_close(parts, whole)
        assert module.sizes.seen[-2:] == [4, 4]


class Noisy(Wide):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.sizes.seen.append(len(batch["x"]))
        noise = torch.randn(len(batch["x"]), 12)
        self.log("noise", noise.mean())
        return noise.mean(1)


def test_a_step_that_draws_random_numbers_runs_in_parts_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"draws random numbers of its own: rows are joined") as caught:
        _, module, quiet = evaluated("validate", in_parts(3), Noisy)
    assert ["draws random" in str(one.message) for one in caught].count(True) == 1
    assert module.sizes.seen[-2:] == [2, 2]
    assert abs(float(quiet.callback_metrics["noise"])) < 0.3


# Out of memory


class Failing(Everything):
    """Runs out of memory once, late in its third batch, after it has changed all it changes."""

    def __init__(self, batch_idx: int = 2, largest: int = 4) -> None:
        super().__init__()
        self.at, self.largest = batch_idx, largest

    def evaluate(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        torch.rand(3)
        output = super().evaluate(batch, batch_idx)
        if batch_idx == self.at and len(batch["x"]) > self.largest:
            raise torch.OutOfMemoryError("the device is full")
        return output

    validation_step = test_step = predict_step = evaluate


@pytest.mark.parametrize("run", ["validate", "test", "predict"])
def test_after_an_oom_the_batch_runs_again_in_halves_with_the_whole_s_result(run: str) -> None:
    class Sound(Failing):
        def __init__(self) -> None:
            super().__init__(batch_idx=99)

    whole, one, plain = evaluated(run, None, Sound)
    parts, other, split = evaluated(run, BudgetOptions(budget_bytes=PLENTY), Failing)
    assert other.sizes.seen[-3:] == [4, 4, 4]
    assert_close(parts, whole)
    assert_close(dict(split.callback_metrics), dict(plain.callback_metrics))
    assert len(other.rows) == len(one.rows) == 4
    assert other.metrics_of_tokens["accuracy"].state_dict() == one.metrics_of_tokens["accuracy"].state_dict()


def test_recovery_can_be_declined() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="^the device is full$"):
        evaluated("validate", BudgetOptions(budget_bytes=PLENTY, recover=False), Failing)


def test_at_one_sample_the_error_names_remedies() -> None:
    with (
        pytest.warns(UserWarning, match="two samples at once run out of memory"),
        pytest.raises(torch.OutOfMemoryError, match=r"A part of 1 sample runs out .*PureBF16Precision"),
    ):
        evaluated("validate", BudgetOptions(budget_bytes=PLENTY), lambda: Failing(largest=0))


def test_other_errors_surface_unchanged() -> None:
    error = RuntimeError("NCCL communicator was aborted, out of memory")

    class Broken(Wide):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            if batch_idx == 1:
                raise error

    with pytest.raises(RuntimeError) as caught:
        evaluated("validate", in_parts(8), Broken)
    assert caught.value is error


# Within the loops


def fitted(options: BudgetOptions | None, module: LightningModule, **arguments: Any) -> Trainer:
    torch.manual_seed(1)
    quiet = trainer(max_steps=6, num_sanity_val_steps=2, val_check_interval=3, **arguments)
    undo = keep_budget_in_evaluation(quiet, options) if options else lambda: None
    quiet.fit(module, loader(8), [loader(8, count=12), loader(6, count=12)])
    undo()
    return quiet


class Validated(Everything):
    """Two loaders, and the values of every validation."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[dict[str, float]] = []
        self.stages: list[bool] = []

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.stages.append(torch.is_grad_enabled())
        return self.evaluate(batch, batch_idx)

    def on_validation_end(self) -> None:
        self.history.append({key: float(value) for key, value in self.trainer.callback_metrics.items()})


def built(kind: type[LightningModule]) -> Any:
    torch.manual_seed(0)
    return kind()


def test_validation_within_a_fit_keeps_its_values_and_leaves_training_alone() -> None:
    whole, parts = built(Validated), built(Validated)
    fitted(None, whole)
    fitted(in_parts(), parts)
    assert len(parts.history) == len(whole.history) == 3  # the sanity check, and two
    assert_close(parts.history, whole.history)
    assert {"loss_epoch/dataloader_idx_0", "loss_epoch/dataloader_idx_1"} <= set(parts.history[-1])
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))
    assert not any(parts.stages)
    assert parts.training


def test_what_the_optimizer_has_come_to_hold_since_the_sanity_check_is_counted() -> None:
    """Moments and gradients take three times the weights' bytes; the budget holds them and four rows, not eight."""

    class Trained(Wide):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.linear(batch["x"] / 50).square().mean()

        def on_validation_start(self) -> None:
            self.sizes.seen.append(0)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    parameters = 13 * 512 * 4
    alone = BudgetOptions(budget_bytes=peak_of(Wide(), 8) + parameters, headroom=0.0)
    module = built(Trained)
    quiet = trainer(max_steps=1, num_sanity_val_steps=1, val_check_interval=1, limit_val_batches=1)
    keep_budget_in_evaluation(quiet, alone)
    quiet.fit(module, loader(8), loader(8, count=8))
    assert module.sizes.seen[:3] == [0, 8, 8]  # measured, and the sanity check
    assert module.sizes.seen[-2:] == [1, 1]
    assert module.sizes.seen[3:5] == [0, 8]


def test_a_module_that_optimizes_manually_is_evaluated_in_parts() -> None:
    class Manual(Everything):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    whole, _, _ = evaluated("validate", None, Manual)
    parts, module, _ = evaluated("validate", in_parts(), Manual)
    assert_close(parts, whole)
    assert max(module.sizes.seen) == 5  # the samples that were compared at once


def test_step_values_reach_the_logger_once_a_batch() -> None:
    class Kept(CSVLogger):
        def __init__(self) -> None:
            super().__init__("unused")
            self.steps: list[tuple[int, float]] = []

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            if "loss_step" in metrics:
                self.steps.append((step or 0, metrics["loss_step"]))

        def save(self) -> None:
            """Nothing goes to a file."""

    kept: list[list[tuple[int, float]]] = []
    for options in (None, in_parts()):
        quiet, logger = trainer(), Kept()
        quiet.logger = logger
        if options:
            keep_budget_in_evaluation(quiet, options)
        quiet.validate(built(Everything), loader(8, count=28), verbose=False)
        kept.append(logger.steps)
    assert [step for step, _ in kept[1]] == [0, 1, 2, 3]
    for one, other in zip(*kept, strict=True):
        assert one == (other[0], pytest.approx(other[1], rel=2e-6))


def test_transfer_hooks_run_once_a_part_and_batches_that_fit_are_moved_as_ever() -> None:
    class Moved(Wide):
        def __init__(self) -> None:
            super().__init__()
            self.moved = Seen()

        def on_after_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
            self.moved.seen.append(len(batch["x"]))
            return {"x": batch["x"] + 1}

        def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.moved.seen.append(int(batch["x"].min()))

    rows = [{"x": torch.full((12,), 50)} for _ in range(20)]
    data = DataLoader(rows, batch_size=8)  # pyright: ignore[reportArgumentType]
    whole, one, _ = evaluated("validate", None, Moved, data)
    parts, other, _ = evaluated("validate", in_parts(4), Moved, data)
    assert parts == whole
    assert one.moved.seen == [8, 51, 8, 51, 4, 51]
    assert other.moved.seen == [
        50,
        *(5, 1, 2, 2),
        4,
        4,
        50,
        4,
        4,
        4,
        51,
    ]  # in brackets: what is compared first


def test_a_step_that_fetches_by_itself_is_left_alone() -> None:
    class Fetching(Wide):
        def validation_step(self, dataloader_iter: Any) -> None:
            batch, _, _ = next(dataloader_iter)
            self.sizes.seen.append(len(batch["x"]))

    with pytest.warns(UserWarning, match="dataloader_iter"):
        _, module, _ = evaluated("validate", in_parts(), Fetching)
    assert module.sizes.seen == [8, 8, 8, 4]


def test_a_batch_that_can_not_be_split_runs_whole() -> None:
    rows = [{"x": torch.ones(8, 12), "mask": torch.ones(3)} for _ in range(2)]
    data = DataLoader(rows, batch_size=None)  # pyright: ignore[reportArgumentType]
    _, module, _ = evaluated("validate", BudgetOptions(budget_bytes=PLENTY), Wide, data)
    assert module.sizes.seen == [8, 8, 8]
    with pytest.warns(UserWarning, match="runs its batches whole, .* disagree on the leading size"):
        evaluated("validate", BudgetOptions(budget_bytes=60_000), Wide, data)


def test_values_that_only_later_batches_tell_apart_are_compared_again() -> None:
    """All labels count in the first batches, so that means over labels and over samples are one."""
    rows = [{"x": torch.full((4,), float(i)), "labels": torch.ones(4, dtype=torch.int64)} for i in range(24)]
    for i in (17, 20, 21):
        rows[i]["labels"][: i % 4] = -100

    class Mean(Wide):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            counts = batch["labels"] != -100
            self.log("by label", (batch["x"] * counts).sum() / counts.sum())
            self.log("by row", batch["x"].mean())

    data = DataLoader(rows, batch_size=8)  # pyright: ignore[reportArgumentType]
    whole, _, _ = evaluated("validate", None, Mean, data)
    parts, _, _ = evaluated("validate", in_parts(), Mean, data)
    assert_close(parts, whole)


# Predictions


def test_predictions_that_do_not_fit_the_host_are_refused_after_the_first_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    little = Capacity(total_bytes=2**30, free_bytes=3 * 8 * 12 * 50 * 4)
    monkeypatch.setattr(_predictions, "capacity", lambda device: little)
    modules: list[Any] = []

    def module() -> LightningModule:
        modules.append(Everything())
        return modules[0]

    with pytest.raises(BudgetError, match=r"outputs of 4 batches, about .* free.*return_predictions=False"):
        evaluated("predict", BudgetOptions(budget_bytes=PLENTY), module)
    assert modules[0].sizes.seen == [8, 8]  # measured, and run


def test_predictions_that_pass_the_budget_are_warned_about_on_the_host() -> None:
    class Outputs(Wide):
        def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.linear(batch["x"] / 50)

    with pytest.warns(
        UserWarning, match=r"outputs of 20 batches, about 320.0 KiB .* passes the budget of 244.1 KiB"
    ):
        evaluated("predict", BudgetOptions(budget_bytes=250_000), Outputs, loader(8, count=160))


def test_predictions_that_are_not_kept_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_predictions, "capacity", lambda device: Capacity(total_bytes=1, free_bytes=1))
    quiet = trainer()
    keep_budget_in_evaluation(quiet, BudgetOptions(budget_bytes=PLENTY))
    assert quiet.predict(built(Everything), loader(8, count=28), return_predictions=False) is None


def test_the_bytes_of_a_view_are_its_storage_s() -> None:
    logits = torch.zeros(8, 12, 50)
    assert bytes_of({"last": logits[:, -1], "all": logits}) == 8 * 12 * 50 * 4
    assert bytes_of(logits[:, -1].clone()) == 8 * 50 * 4


def test_a_prediction_writer_gets_whole_batches(tmp_path: Path) -> None:
    class Writer(BasePredictionWriter):
        def __init__(self) -> None:
            super().__init__("batch_and_epoch")
            self.written: list[Any] = []

        def write_on_batch_end(
            self, trainer: Any, module: Any, prediction: Any, indices: Any, *rest: Any
        ) -> None:
            self.written.append((len(prediction["logits"]), indices))

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
            self.written.append(len(predictions))

    writer = Writer()
    quiet = trainer(writer)
    keep_budget_in_evaluation(quiet, in_parts())
    quiet.predict(built(Everything), loader(8, count=12), return_predictions=False)
    assert writer.written == [(8, list(range(8))), (4, list(range(8, 12))), 2]

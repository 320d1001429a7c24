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
from torch.utils._pytree import tree_leaves, tree_structure
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from lightning_memkit.memory.measure import Capacity
from lightning_memkit.memory.meter import ByteMeter
from lightning_memkit.micro_batching.evaluation import predictions
from lightning_memkit.micro_batching.evaluation.predictions import bytes_of
from lightning_memkit.micro_batching.options import BudgetOptions
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from lightning_memkit.plugins.memory_budget._evaluation import keep_budget_in_evaluation
from lightning_memkit.utilities.tensors import tensors_of
from tests.plugins.toys import TokenTagger, loader, trainer

PLENTY = 2**30


class Logging(TokenTagger):
    """Returns nothing; logs in every way that people do, by number and by metric; `sizes` tells what came."""

    def __init__(self) -> None:
        super().__init__()
        auroc = MulticlassAUROC(50, thresholds=20, ignore_index=-100)
        metrics: Any = {"accuracy": MulticlassAccuracy(50, ignore_index=-100), "auroc": auroc}
        self.metrics_of_tokens = MetricCollection(metrics)
        self.gathered = CatMetric()
        self.rows = 0
        self.sizes = Seen()
        self.ends: list[Any] = []

    def evaluate(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.sizes.seen.append(len(batch["x"]))
        logits = self.head(self.mix(self.embedding(batch["x"]))[0])
        labels = batch["labels"].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), labels)
        self.rows += len(batch["x"])
        counted = (batch["labels"] != -100).sum()
        if not self.trainer.predicting:
            self.metrics_of_tokens.update(logits.flatten(0, 1), labels)
            self.gathered.update(logits.argmax(-1))
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log("own count", loss, batch_size=int(counted))
            self.log("perplexity", loss.exp())
            self.log("mean_x", batch["x"].float().mean())
            self.log("labels", counted.float(), reduce_fx="sum")
            self.log("largest", logits.max(), reduce_fx="max")
            self.log("largest, averaged", logits.max())
            self.log_dict(self.metrics_of_tokens, on_step=False, on_epoch=True)
            if batch_idx % 2:
                self.log("odd", loss)
        return self.returned(logits, loss)

    def returned(self, logits: Tensor, loss: Tensor) -> Any:
        return None

    validation_step = test_step = predict_step = evaluate

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.ends.append(outputs)

    def on_validation_epoch_end(self) -> None:
        self.log("gathered", self.gathered.compute().mean())
        self.log("rows", float(self.rows))


class Returning(Logging):
    """Returns what it has computed."""

    def returned(self, logits: Tensor, loss: Tensor) -> Any:
        return {
            "loss": loss,
            "logits": logits,
            "texts": [str(row.argmax()) for row in logits],
            "nothing": None,
        }


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
    module: Callable[[], LightningModule] = Logging,
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


def assert_same(a: Any, b: Any) -> None:
    """To the bit: nothing was split."""
    assert tree_structure(a) == tree_structure(b)
    for one, other in zip(tree_leaves(a), tree_leaves(b), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


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


def late_labels() -> DataLoader:
    """Three batches of 8 rows, of which the last is the first where labels don't count."""
    rows = [{"x": torch.full((12,), i % 7), "labels": torch.ones(12, dtype=torch.int64)} for i in range(24)]
    for i in (17, 20, 21):
        rows[i]["labels"][: i - 10] = -100
    return DataLoader(rows, batch_size=8)  # pyright: ignore[reportArgumentType]


def peak_of(kind: Callable[[], LightningModule], rows: int, data: Any = None, run: str = "validate") -> int:
    """The bytes that some rows of a loader's first batch need, by this test's own use of a meter."""
    peaks: list[int] = []
    torch.manual_seed(0)
    module: Any = kind()
    name = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}[run]
    step = getattr(module, name)

    def metered(batch: dict[str, Tensor], *rest: int) -> Any:
        meter = ByteMeter()
        meter.track(tensors_of([vars(owner) for owner in module.modules()]))
        meter.track(batch.values())
        with meter:
            output = step({key: value[:rows] for key, value in batch.items()}, *rest)
        peaks.append(meter.peak_bytes)
        return output

    setattr(module, name, metered)
    quiet = trainer(limit_val_batches=1, limit_test_batches=1, limit_predict_batches=1)
    getattr(quiet, run)(
        module, loader(8) if data is None else data, **({} if run == "predict" else {"verbose": False})
    )
    return peaks[0]


def in_parts(
    size: int = 3, kind: Callable[[], LightningModule] = Logging, data: Any = None, **options: Any
) -> BudgetOptions:
    """A budget that holds so many rows of a batch of 8, and no more."""
    budget = (peak_of(kind, size, data) + peak_of(kind, size + 1, data)) // 2
    return BudgetOptions(**{"budget_bytes": budget, "headroom": 0.0, **options})


# The unsplit batch's results


@pytest.mark.parametrize("run", ["validate", "test"])
@pytest.mark.parametrize("size", [1, 3])
def test_logged_values_and_metrics_are_the_unsplit_batch_s(run: str, size: int) -> None:
    whole, one, plain = evaluated(run, None)
    parts, other, split = evaluated(run, in_parts(size))
    assert max(one.sizes.seen) == 8
    assert other.sizes.seen[-1] == (1 if size == 1 else 2)  # the last batch has 4 rows
    assert_close(parts, whole)
    assert_close(dict(split.callback_metrics), dict(plain.callback_metrics))
    assert len(whole[0]) >= 9
    assert other.rows == one.rows == 28
    assert torch.equal(other.gathered.compute(), one.gathered.compute())
    assert other.metrics_of_tokens["accuracy"].state_dict() == one.metrics_of_tokens["accuracy"].state_dict()
    assert other.ends == one.ends == ([None] * 4 if run == "validate" else [])


@pytest.mark.parametrize("run", ["validate", "test"])
def test_what_a_step_returns_is_not_joined_its_batches_run_whole_with_a_warning(run: str) -> None:
    whole, one, _ = evaluated(run, None, Returning)
    budget = in_parts(3, Returning)
    words = (
        rf"Returning.{'validation' if run == 'validate' else 'test'}_step runs its batches of 8 samples whole, which "
        r"exceeds the budget's usable .* KiB: what it returns would have to be joined. Use a smaller batch_size in "
        "dataloader 0; or return None, and log"
    )
    with pytest.warns(UserWarning, match=words) as caught:
        parts, other, _ = evaluated(run, budget, Returning)
    assert ["whole" in str(one.message) for one in caught].count(True) == 1
    assert other.sizes.seen[-4:] == [8, 8, 8, 4]
    assert_same(parts, whole)
    assert_same(other.ends, one.ends)


def test_predictions_run_whole_with_a_warning() -> None:
    whole, _, _ = evaluated("predict", None, Returning)
    budget = BudgetOptions(budget_bytes=peak_of(Returning, 4, run="predict"), headroom=0.0)
    with pytest.warns(
        UserWarning, match=r"predict_step runs its batches of 8 .* predictions are never split"
    ) as caught:
        parts, module, _ = evaluated("predict", budget, Returning)
    assert ["whole" in str(one.message) for one in caught].count(True) == 1
    assert_same(parts, whole)
    assert module.sizes.seen == [8, 8, 8, 8, 4]  # the first is measured before it runs


def test_weighing_by_samples_would_differ() -> None:
    """The control: parts averaged by their rows, as a loop with a smaller batch_size has it."""
    whole, _, _ = evaluated("validate", None)
    naive, _, _ = evaluated("validate", None, data=loader(3, count=28))
    assert abs(naive[0]["loss_epoch"] - whole[0]["loss_epoch"]) > 1e-3


# Sizes


class Wide(LightningModule):
    """Needs many times the bytes of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(12, 512)
        self.sizes = Seen()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.sizes.seen.append(len(batch["x"]))
        self.log("mean", self.rows(batch["x"]).mean())

    test_step = validation_step

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.sizes.seen.append(len(batch["x"]))
        return self.rows(batch["x"])

    def rows(self, x: Tensor) -> Tensor:
        return self.linear(x / 50).exp().tanh().mean(-1)


@pytest.mark.parametrize("run", ["validate", "test"])
def test_the_largest_part_that_fits_is_measured(run: str) -> None:
    budget = (peak_of(Wide, 4) + peak_of(Wide, 5)) // 2
    _, module, _ = evaluated(run, BudgetOptions(budget_bytes=budget, headroom=0.0), Wide)
    assert module.sizes.seen[-7:] == [4, 4, 4, 4, 4, 4, 4]
    _, module, _ = evaluated(run, BudgetOptions(budget_bytes=peak_of(Wide, 4) - 1, headroom=0.0), Wide)
    assert module.sizes.seen[-5:] == [3, 3, 2, 2, 2]  # 8 rows, and the last 4


def test_a_batch_that_fits_is_lightning_s_own_affair_whatever_the_size_of_training_s_parts() -> None:
    for size in ("auto", 2):
        options = BudgetOptions(budget_bytes=PLENTY, micro_batch_size=size)
        _, module, _ = evaluated("validate", options, Wide)
        assert module.sizes.seen == [8, 8, 8, 8, 4]  # the first is measured before it runs


def test_where_a_batch_is_split_no_part_is_larger_than_training_s() -> None:
    _, module, _ = evaluated("validate", in_parts(3, Wide, micro_batch_size=2), Wide)
    assert module.sizes.seen[-6:] == [2] * 6


def test_where_not_even_one_sample_fits_the_error_says_by_how_much() -> None:
    with pytest.raises(
        BudgetError, match=r"micro-batch of 1 sample needs .* in validation_step, .* more .* budget=\"1MiB\""
    ):
        evaluated("validate", BudgetOptions(budget_bytes=30_000), Wide)


def test_longer_samples_are_measured_when_they_come() -> None:
    rows = [{"x": torch.ones(12 if i < 8 else 48, dtype=torch.int64)} for i in range(16)]

    class Long(Wide):
        def rows(self, x: Tensor) -> Tensor:
            return super().rows(x.unfold(1, 12, 12))

    data = DataLoader(rows, batch_size=8)  # pyright: ignore[reportArgumentType]
    budget = BudgetOptions(budget_bytes=140_000, headroom=0.0)
    whole, _, _ = evaluated("validate", None, Long, data)
    parts, module, _ = evaluated("validate", budget, Long, data)
    assert module.sizes.seen[:3] == [8, 8, 8]  # measured, run, and the longer ones begun whole
    assert max(module.sizes.seen[-2:]) <= 4
    assert_close(parts, whole)


# Out of memory


class Failing(Logging):
    """Runs out of memory once, late in its third batch, after it has changed all it changes."""

    def __init__(self, batch_idx: int = 2, largest: int = 4) -> None:
        super().__init__()
        self.at, self.largest = batch_idx, largest

    def evaluate(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        output = super().evaluate(batch, batch_idx)
        if batch_idx == self.at and len(batch["x"]) > self.largest:
            raise torch.OutOfMemoryError("the device is full")
        return output

    validation_step = test_step = predict_step = evaluate


@pytest.mark.parametrize("run", ["validate", "test"])
def test_after_an_oom_the_batch_runs_again_in_halves_with_the_whole_s_result(run: str) -> None:
    class Sound(Failing):
        def __init__(self) -> None:
            super().__init__(batch_idx=99)

    whole, one, plain = evaluated(run, None, Sound)
    parts, other, split = evaluated(run, BudgetOptions(budget_bytes=PLENTY), Failing)
    assert other.sizes.seen[-3:] == [4, 4, 4]
    assert_close(parts, whole)
    assert_close(dict(split.callback_metrics), dict(plain.callback_metrics))
    assert other.rows == one.rows == 28
    assert other.metrics_of_tokens["accuracy"].state_dict() == one.metrics_of_tokens["accuracy"].state_dict()


def test_recovery_can_be_declined() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="^the device is full$"):
        evaluated("validate", BudgetOptions(budget_bytes=PLENTY, recover=False), Failing)


def test_at_one_sample_the_error_names_remedies() -> None:
    with pytest.raises(
        torch.OutOfMemoryError, match=r"A micro-batch of 1 sample runs out .*PureBF16Precision"
    ):
        evaluated(
            "validate", BudgetOptions(budget_bytes=PLENTY), lambda: Failing(largest=0), loader(1, count=4)
        )


def test_other_errors_surface_unchanged() -> None:
    error = RuntimeError("NCCL communicator was aborted, out of memory")

    class Broken(Wide):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            if batch_idx == 1:
                raise error

    with pytest.raises(RuntimeError) as caught:
        evaluated("validate", BudgetOptions(budget_bytes=PLENTY), Broken)
    assert caught.value is error


# Within the loops


def fitted(options: BudgetOptions | None, module: LightningModule, **arguments: Any) -> Trainer:
    torch.manual_seed(1)
    quiet = trainer(max_steps=6, num_sanity_val_steps=2, val_check_interval=3, **arguments)
    undo = keep_budget_in_evaluation(quiet, options) if options else lambda: None
    quiet.fit(module, loader(8), [loader(8, count=12), loader(6, count=12)])
    undo()
    return quiet


class Validated(Logging):
    """Two loaders, and the values of every validation."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[dict[str, float]] = []
        self.indices, self.most = Seen(), 8

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        assert not torch.is_grad_enabled()
        self.indices.seen.append(dataloader_idx)
        self.evaluate(batch, batch_idx)
        if len(batch["x"]) > self.most:
            raise torch.OutOfMemoryError("the device is full")

    def on_validation_end(self) -> None:
        self.history.append({key: float(value) for key, value in self.trainer.callback_metrics.items()})


def built(kind: type[LightningModule]) -> Any:
    torch.manual_seed(0)
    return kind()


def test_validation_within_a_fit_keeps_its_values_and_leaves_training_alone() -> None:
    whole, parts = built(Validated), built(Validated)
    fitted(None, whole)
    parts.most = 3
    fitted(BudgetOptions(budget_bytes=PLENTY), parts)
    assert len(parts.history) == len(whole.history) == 3  # the sanity check, and two
    assert_close(parts.history, whole.history)
    assert {"loss_epoch/dataloader_idx_0", "loss_epoch/dataloader_idx_1"} <= set(parts.history[-1])
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))
    assert parts.training
    assert parts.sizes.seen[-9:] == [3, 3, 2, 2, 2, 3, 3, 3, 3]
    assert parts.indices.seen[-4:] == [1] * 4


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
    alone = BudgetOptions(budget_bytes=peak_of(Wide, 8) + parameters, headroom=0.0)
    module = built(Trained)
    quiet = trainer(max_steps=1, num_sanity_val_steps=1, val_check_interval=1, limit_val_batches=1)
    keep_budget_in_evaluation(quiet, alone)
    quiet.fit(module, loader(8), loader(8, count=8))
    assert module.sizes.seen[:3] == [0, 8, 8]  # measured, and the sanity check
    assert module.sizes.seen[-2:] == [1, 1]
    assert module.sizes.seen[3:5] == [0, 8]


def test_a_module_that_optimizes_manually_is_evaluated_in_parts() -> None:
    class Manual(Logging):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    whole, _, _ = evaluated("validate", None, Manual)
    parts, module, _ = evaluated("validate", in_parts(3, Manual), Manual)
    assert_close(parts, whole)
    assert module.sizes.seen[-4:] == [3, 2, 2, 2]


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
        quiet.validate(built(Logging), loader(8, count=28), verbose=False)
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
    parts, other, _ = evaluated("validate", in_parts(4, Moved, data), Moved, data)
    assert_close(parts, whole)
    assert one.moved.seen == [8, 51, 8, 51, 4, 51]
    begins = other.moved.seen.index(50)
    assert other.moved.seen[:begins] == [8]  # measured
    assert other.moved.seen[begins + 1 :][:4] == [5, 1, 2, 2]  # compared
    assert other.moved.seen[-7:] == [4, 4, 50, 4, 4, 4, 51]


def test_a_step_that_fetches_by_itself_is_left_alone() -> None:
    class Fetching(Wide):
        def validation_step(self, dataloader_iter: Any) -> None:
            batch, _, _ = next(dataloader_iter)
            self.sizes.seen.append(len(batch["x"]))

    with pytest.warns(UserWarning, match="dataloader_iter"):
        _, module, _ = evaluated("validate", BudgetOptions(budget_bytes=30_000), Fetching)
    assert module.sizes.seen == [8, 8, 8, 4]


def test_values_that_only_later_batches_tell_apart_are_compared_again() -> None:
    """All labels count in the first batches, so that means over labels and over samples are one."""

    class Mean(Wide):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.sizes.seen.append(len(batch["x"]))
            counts = batch["labels"] != -100
            per_row = self.rows(batch["x"])
            self.log("by label", (per_row[:, None] * counts).sum() / counts.sum())
            self.log("by row", per_row.mean())

    data = late_labels()
    whole, _, _ = evaluated("validate", None, Mean, data)
    parts, module, _ = evaluated("validate", in_parts(3, Mean, data), Mean, data)
    assert_close(parts, whole)
    assert module.sizes.seen[-3:] == [3, 3, 2]
    assert module.sizes.seen.count(5) == 2  # compared at the first batch, and at the last


def test_an_accuracy_of_nothing_in_the_compared_samples_is_learned_where_there_is_one() -> None:
    """All rules give 0 for the first 5 rows; a micro-batch that has a hit tells means, sums and extremes apart."""

    class Rare(Wide):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.sizes.seen.append(len(batch["x"]))
            self.rows(batch["x"])
            hits = (batch["x"][:, 0] == 6).float()
            self.log("accuracy", hits.mean())
            self.log("hits", hits.sum(), reduce_fx="sum")
            self.log("any", hits.amax(), reduce_fx="max")

    rows = [{"x": torch.full((12,), 6 if i in (6, 11, 12, 21) else 1)} for i in range(24)]
    data = DataLoader(rows, batch_size=8)  # pyright: ignore[reportArgumentType]
    whole, _, _ = evaluated("validate", None, Rare, data)
    parts, module, _ = evaluated("validate", in_parts(3, Rare, data), Rare, data)
    assert_close(parts, whole)
    assert module.sizes.seen[-3:] == [3, 3, 2]


# Predictions


def test_predictions_that_do_not_fit_the_host_are_refused_after_the_first_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    little = Capacity(total_bytes=2**30, free_bytes=3 * 8 * 12 * 50 * 4)
    monkeypatch.setattr(predictions, "capacity", lambda device: little)
    modules: list[Any] = []

    def module() -> LightningModule:
        modules.append(Returning())
        return modules[0]

    with pytest.raises(BudgetError, match=r"outputs of 4 batches, about .* free.*return_predictions=False"):
        evaluated("predict", BudgetOptions(budget_bytes=PLENTY), module)
    assert modules[0].sizes.seen == [8, 8]  # measured, and run


def test_predictions_that_exceed_the_budget_are_warned_about_on_the_host() -> None:
    class Outputs(Wide):
        def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.linear(batch["x"] / 50)

    with pytest.warns(
        UserWarning, match=r"outputs of 20 batches, about 320.0 KiB .* exceeds the budget of 244.1 KiB"
    ):
        evaluated("predict", BudgetOptions(budget_bytes=250_000), Outputs, loader(8, count=160))


def test_predictions_that_are_not_kept_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "capacity", lambda device: Capacity(total_bytes=1, free_bytes=1))
    quiet = trainer()
    keep_budget_in_evaluation(quiet, BudgetOptions(budget_bytes=PLENTY))
    assert quiet.predict(built(Returning), loader(8, count=28), return_predictions=False) is None


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
    keep_budget_in_evaluation(quiet, BudgetOptions(budget_bytes=PLENTY))
    quiet.predict(built(Returning), loader(8, count=12), return_predictions=False)
    assert writer.written == [(8, list(range(8))), (4, list(range(8, 12))), 2]

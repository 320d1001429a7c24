"""Validation, test and prediction within a budget: the oracle is Lightning without it, on the unsplit batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from lightning_memkit.plugins._evaluation import EvaluationOptions, keep_budget_in_evaluation
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


class Seen:
    """Sizes that reached the step; a plain object, so that no rollback puts it back."""

    def __init__(self) -> None:
        self.seen: list[int] = []


def evaluated(
    run: str,
    options: EvaluationOptions | None,
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


def in_parts(size: int = 3, **options: Any) -> EvaluationOptions:
    return EvaluationOptions(**{"budget_bytes": PLENTY, "micro_batch_size": size, **options})


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

"""What `MemoryBudget` counts in evaluation: every byte where it is to be enforced always, and every retry."""

import logging
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_memkit import MemoryBudget
from tests.plugins.test_evaluation import Seen
from tests.plugins.toys import loader, trainer


class Kept(CSVLogger):
    """Remembers what it is given, and writes nothing."""

    def __init__(self) -> None:
        super().__init__("unused")
        self.retries: list[tuple[int | None, float]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if "memory_budget/retries" in metrics:
            self.retries.append((step, metrics["memory_budget/retries"]))

    def save(self) -> None:
        """Nothing goes to a file."""


class Swelling(LightningModule):
    """Needs five times the memory in its third batch, whose tensors are no larger than the others'."""

    def __init__(self, raises: bool = False) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(12, 512)
        self.raises = raises
        self.sizes = Seen()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("mean", self.evaluate(batch, batch_idx).mean())

    test_step = validation_step

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.evaluate(batch, batch_idx)

    def evaluate(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.sizes.seen.append(len(batch["x"]))
        hidden = [self.linear(batch["x"] / 50) for _ in range(5 if batch_idx == 2 else 1)]
        if self.raises and batch_idx == 2 and len(batch["x"]) > 4:
            raise torch.OutOfMemoryError("the device is full")
        return torch.stack([h.exp().mean(1) for h in hidden]).mean(0)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.linear(batch["x"] / 50).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


def run(method: str, budget: MemoryBudget, **options: Any) -> tuple[Swelling, Any, Kept]:
    torch.manual_seed(0)
    module, logger = Swelling(**options), Kept()
    quiet = trainer(budget)
    quiet.logger = logger
    more: dict[str, Any] = {} if method == "predict" else {"verbose": False}
    result = getattr(quiet, method)(module, loader(8, count=32), **more)
    return module, result, logger


@pytest.mark.parametrize("method", ["validate", "test"])
def test_every_byte_of_evaluation_is_counted_where_the_budget_is_enforced_always(method: str) -> None:
    """Weights of 26 KiB, and 16 KiB of hidden values for 8 rows: five times these at once do not fit."""
    verified = MemoryBudget("100KiB")
    module, whole, logger = run(method, verified)
    assert module.sizes.seen == [8] * 5
    assert verified.retries == 0
    assert verified.peak_bytes == 0
    always = MemoryBudget("100KiB", enforce="always")
    module, parts, logger = run(method, always)
    assert max(module.sizes.seen[-4:]) < 8
    assert always.retries == 1
    assert logger.retries == [(0, 1.0)]
    assert 26_000 < always.peak_bytes <= always.budget_bytes
    assert parts == [pytest.approx(values, rel=1e-6) for values in whole]


def test_predictions_over_a_budget_that_is_enforced_always_are_an_oom_that_names_the_remedy() -> None:
    words = r"predict_step runs out of memory .* can't be split: .* Use a smaller batch_size in dataloader 0"
    with pytest.warns(UserWarning, match="whole"), pytest.raises(torch.OutOfMemoryError, match=words):
        run("predict", MemoryBudget("100KiB", enforce="always"))


def test_a_retry_of_evaluation_is_counted_and_told_like_one_of_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero")
    budget = MemoryBudget("1GiB")
    module, _, logger = run("validate", budget, raises=True)
    assert module.sizes.seen[-3:] == [4, 4, 4]
    assert budget.retries == 1
    assert logger.retries == [(0, 1.0)]
    told = [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()]
    assert len(told) == 1
    assert "out of memory in validation_step with 8 samples" in told[0]


def test_retries_of_training_and_of_its_validation_add_up() -> None:
    budget, logger = MemoryBudget("1GiB", micro_batch_size=4), Kept()
    failed: list[bool] = []  # not the module's own, which the retry puts back

    class Both(Swelling):
        def on_before_backward(self, loss: Tensor) -> None:  # not called in probes
            if self.global_step == 3 and not failed:
                failed.append(True)
                raise torch.OutOfMemoryError("the device is full")

        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            if batch_idx == 2 and len(batch["x"]) > 4:
                raise torch.OutOfMemoryError("the device is full")
            super().validation_step(batch, batch_idx)

    quiet = trainer(budget, max_steps=4)
    quiet.logger = logger
    with pytest.warns(UserWarning, match="Both.on_before_backward: runs in every micro-batch"):
        quiet.fit(Both(), loader(8, count=32), loader(8, count=32))
    assert budget.retries == 2
    assert logger.retries == [(3, 1.0), (4, 2.0)]

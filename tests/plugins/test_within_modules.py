"""MemoryBudget over losses that can't be split: batches run whole, modules in chunks, with the batch's result."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget, NoEffectWarning
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from tests.plugins.failing_chunks import assert_goes_on_in_chunks, assert_retried_wherever_it_fails
from tests.plugins.noise import NOISE
from tests.plugins.toys import trained, trainer, weights

pytestmark = NOISE
ROWS, WIDTH, STEPS, DEPTH = 32, 32, 5, 10
BUDGET = "850KiB"  # 676 KiB are weights, gradients and states; the whole batch takes 340 KiB more


def tower() -> nn.Module:
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 8))


Loss = Callable[[Tensor, Tensor], Tensor]


def clip(one: Tensor, other: Tensor) -> Tensor:
    scores = 5 * F.normalize(one, dim=1) @ F.normalize(other, dim=1).T
    return F.cross_entropy(scores, torch.arange(len(scores)))


def vicreg(one: Tensor, other: Tensor) -> Tensor:
    spread = sum((1 - (out.var(0) + 1e-4).sqrt()).relu().mean() for out in (one, other))
    return F.mse_loss(one, other) + spread


class Pairs(LightningModule):
    """Two towers under one loss; counts its steps."""

    def __init__(self, loss: Loss = clip) -> None:
        super().__init__()
        self.first, self.second = tower(), tower()
        self.loss = loss
        self.steps, self.rows = 0, list[int]()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        self.steps += 1
        self.rows.append(len(batch["x"]))
        loss = self.loss(self.first(batch["x"]), self.second(batch["y"]))
        self.log("loss", loss)
        return {"loss": loss, "rows": len(batch["x"])}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self.loss(self.first(batch["x"]), self.second(batch["y"])))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def rows(dtype: torch.dtype = torch.float64, batch_size: int = ROWS) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 8 * ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    data: Any = [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]
    return DataLoader(data, batch_size=batch_size)


def run(*callbacks: Callback, loss: Loss = clip, **options: Any) -> tuple[Pairs, Any]:
    given = {"max_steps": STEPS, "data": rows(), "dtype": torch.float64, "precision": "64-true", **options}
    module, fitted = trained(*callbacks, module=lambda: Pairs(loss), **given)
    assert isinstance(module, Pairs)
    return module, fitted


@pytest.mark.parametrize(
    "options", [{}, {"within": "modules"}, {"within": "modules", "micro_batch_size": 3}], ids=str
)
@pytest.mark.parametrize("loss", [clip, vicreg])
def test_a_loss_over_the_whole_batch_trains_within_the_budget(loss: Loss, options: dict[str, Any]) -> None:
    plain, unbounded = run(loss=loss)
    budget = MemoryBudget(BUDGET, **options)
    module, fitted = run(budget, loss=loss)
    assert float((weights(module) - weights(plain)).abs().max()) <= 1e-11
    assert float(fitted.callback_metrics["loss"]) == pytest.approx(
        float(unbounded.callback_metrics["loss"]), abs=1e-10
    )
    assert module.steps == plain.steps == STEPS
    assert set(module.rows) == {ROWS}
    assert budget.sizing is not None
    chunk = budget.sizing.chunk_rows
    assert chunk is not None
    assert chunk == options.get("micro_batch_size", chunk) < ROWS
    assert budget.peak_bytes <= budget.usable_bytes_on(torch.device("cpu"))
    assert [(*change, change.chunk_rows) for change in budget.history] == [(0, ROWS, chunk)]
    assert not any("forward" in vars(part) for part in module.modules())


def test_a_batch_that_fits_runs_as_it_is() -> None:
    plain, _ = run()
    budget = MemoryBudget("64MiB", within="modules")
    module, _ = run(budget)
    assert torch.equal(weights(module), weights(plain))
    assert budget.sizing is not None
    assert budget.sizing.chunk_rows is None


def test_the_message_names_modules_and_rows_and_the_cause(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        run(MemoryBudget(BUDGET))
    said = [record.getMessage() for record in caplog.records if "in chunks of" in record.getMessage()]
    assert any(
        "batches run whole, first, second in chunks of" in text and "act on each other" in text
        for text in said
    ), said
    assert not any("To mend it" in text for text in said)


def test_within_the_step_it_is_refused_as_before() -> None:
    with pytest.raises(BudgetError, match="Whole it does not fit"):
        run(MemoryBudget(BUDGET, within="step"))


def test_a_chunk_that_does_not_fit_is_called_one() -> None:
    with pytest.raises(BudgetError, match="The whole batch with modules in chunks of 1 row needs"):
        run(MemoryBudget("760KiB"))


class Normalized(Pairs):
    """No module in it treats rows alone, but for single layers, whose chunks would free nothing."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("first", "second"):
            layers = [layer for _ in range(20) for layer in (nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))]
            setattr(self, name, nn.Sequential(*layers))


@pytest.mark.filterwarnings("ignore:.*normalize with statistics")
def test_nothing_to_chunk_is_said() -> None:
    options = {"module": Normalized, "data": rows(torch.float32), "max_steps": 2}
    with pytest.raises(BudgetError, match="No module in it treats its rows independently"):
        trained(MemoryBudget(BUDGET), **options)
    with pytest.warns(
        NoEffectWarning, match="micro_batch_size=3 has no effect, and batches run whole. No module"
    ):
        trained(MemoryBudget("64MiB", within="modules", micro_batch_size=3), **options)


class Negates(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x  # its backward does not need x


class WritesLater(Pairs):
    """Writes to what an encoder was given, which a second forward would need."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Sequential(Negates(), *tower().children())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        x = self.stem(batch["x"])
        out = self.first(x)
        x.add_(1)
        return {"loss": self.loss(out, self.second(batch["y"]))}


def test_a_step_that_writes_to_an_input_later_does_not_run_in_chunks() -> None:
    options = {"module": WritesLater, "data": rows(torch.float32), "max_steps": 2}
    trained(**options)
    with pytest.raises(
        BudgetError, match="The step fails where first, second run in chunks: is an input written"
    ):
        trained(MemoryBudget("430KiB"), **options)
    with pytest.warns(NoEffectWarning, match="The step fails where first, second run in chunks"):
        trained(MemoryBudget("64MiB", within="modules", micro_batch_size=3), **options)


def test_an_allocation_that_fails_anywhere_is_retried_in_smaller_chunks() -> None:
    def whole(*callbacks: Callback) -> tuple[Pairs, Any]:
        module, fitted = run(*callbacks)
        assert module.rows == [ROWS] * STEPS
        return module, fitted

    assert_retried_wherever_it_fails(whole, BUDGET, "chunk_rows", 12)


def test_a_batch_that_ran_whole_until_it_ran_out_of_memory_goes_on_in_chunks() -> None:
    assert_goes_on_in_chunks(run, "chunk_rows", ROWS // 2)


def test_a_resumed_run_goes_on_in_the_same_chunks(tmp_path: Path) -> None:
    def resumed(first: Callable[[], list[Callback]], then: list[Callback]) -> Tensor:
        _, half = run(*first(), max_steps=8)  # an epoch
        half.save_checkpoint(tmp_path / "half.ckpt")
        torch.manual_seed(0)
        module = Pairs().double()
        fitted = trainer(*then, max_steps=10, gradient_clip_val=0.5, precision="64-true")
        fitted.fit(module, rows(), ckpt_path=str(tmp_path / "half.ckpt"))
        return weights(module)

    budget = MemoryBudget("64MiB")  # in which the whole batch would fit
    found = resumed(lambda: [MemoryBudget(BUDGET)], [budget])
    assert budget.sizing is not None
    assert budget.sizing.chunk_rows is not None
    assert len(budget.sizing.trials) == 1
    expected = resumed(lambda: [], [])
    assert float((found - expected).abs().max()) <= 1e-11
    budget = MemoryBudget("64MiB", within="step")
    whole = resumed(lambda: [MemoryBudget(BUDGET)], [budget])
    assert budget.sizing is not None
    assert budget.sizing.chunk_rows is None
    assert float((whole - expected).abs().max()) <= 1e-11


def test_evaluation_runs_the_modules_as_they_are() -> None:
    plain, unbounded = run(val_loaders=rows(batch_size=16), max_steps=8)
    module, fitted = run(MemoryBudget(BUDGET), val_loaders=rows(batch_size=16), max_steps=8)
    assert float((weights(module) - weights(plain)).abs().max()) <= 1e-11
    assert float(fitted.callback_metrics["val"]) == pytest.approx(
        float(unbounded.callback_metrics["val"]), rel=1e-6
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"within": "module"}, "within='module' must be one of auto, step, modules"),
        ({"within": "modules", "weigh_by": "labels"}, 'within="modules" never splits a batch'),
        ({"within": "modules", "effective_batch_size": 64}, 'within="modules" never splits a batch'),
        ({"within": "modules", "split": torch.split}, 'within="modules" never splits a batch'),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MemoryBudget(BUDGET, **options)

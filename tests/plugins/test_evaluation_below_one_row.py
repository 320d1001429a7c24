"""Validation, test and prediction where one row does not fit: modules that take tokens one by one run in chunks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memkit import ActivationCheckpointing, MemoryBudget
from lightning_memkit.memory.meter import ByteMeter
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from tests.plugins.test_below_one_row import WIDTH, LongRows, rows
from tests.plugins.toys import trainer
from tests.processes import run_on_ranks

STEPS = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}


class Evaluated(LongRows):
    """The model of the training tests; it logs, and its predictions are one number a row."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("loss", F.mse_loss(self.encoded(batch["x"])[:, :-1], batch["x"][:, 1:]))

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.encoded(batch["x"]).square().mean((1, 2))


class Centred(nn.Module):
    """An MLP whose hidden values are centred over tokens: it can't run in chunks of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(*shape) / 8) for shape in ((WIDTH, 128), (128, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(x @ self.up)
        return x + (hidden - hidden.mean(1, keepdim=True)) @ self.down


class OfAllTokens(Evaluated):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Centred() for _ in range(2))


def made(kind: type[LongRows] = Evaluated) -> LightningModule:
    torch.manual_seed(0)
    return kind().double()


def result(
    kind: str, module: LightningModule, *callbacks: Any, batch_size: int = 1, **options: Any
) -> Tensor:
    fitted = trainer(*callbacks, **{"precision": "64-true", **options})
    found = getattr(fitted, kind)(
        module, rows(batch_size), **({} if kind == "predict" else {"verbose": False})
    )
    return torch.cat(found) if kind == "predict" else torch.tensor(found[0]["loss"], dtype=torch.float64)


def peak_of_a_row(module: LightningModule) -> int:
    x = next(iter(rows(1)))["x"]
    with ByteMeter() as meter, torch.no_grad():
        meter.track([*module.parameters(), x])
        module.encoded(x)  # pyright: ignore[reportCallIssue]
    return meter.peak_bytes


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("kind", STEPS)
def test_a_row_that_does_not_fit_is_evaluated(
    kind: str, batch_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    expected = result(kind, made(), batch_size=batch_size)
    module, budget = made(), MemoryBudget(f"{int(0.8 * peak_of_a_row(made())) // 1024}KiB")
    if kind == "predict" and batch_size > 1:  # predictions are never split, and run whole after a warning
        with pytest.warns(UserWarning, match="runs its batches of 2 samples whole"):
            found = result(kind, module, budget, batch_size=batch_size)
    else:
        with caplog.at_level("INFO"):
            found = result(kind, module, budget, batch_size=batch_size)
        said = [
            one.getMessage() for one in caplog.records if "a row does not fit at once" in one.getMessage()
        ]
        assert len(said) == 1
        assert f"in {STEPS[kind]}" in said[0]
    assert torch.allclose(found, expected, rtol=1e-12, atol=0)
    assert not any("forward" in vars(part) for part in module.modules())


def test_a_row_whose_modules_read_all_tokens_is_refused_as_before() -> None:
    module = made(OfAllTokens)
    with pytest.raises(BudgetError, match="A micro-batch of 1 sample needs"):
        result("validate", module, MemoryBudget(f"{int(0.8 * peak_of_a_row(module)) // 1024}KiB"))


def test_within_step_leaves_modules_alone() -> None:
    module = made()
    with pytest.raises(BudgetError, match="A micro-batch of 1 sample needs"):
        result(
            "validate", module, MemoryBudget(f"{int(0.8 * peak_of_a_row(module)) // 1024}KiB", within="step")
        )


def test_validation_before_and_within_training_in_chunks(caplog: pytest.LogCaptureFixture) -> None:
    """Modules in chunks of both, in turn."""

    def fitted(*callbacks: Any) -> tuple[LightningModule, float]:
        module = made()
        torch.manual_seed(1)
        fit = trainer(*callbacks, precision="64-true", max_steps=4, val_check_interval=2)
        fit.fit(module, rows(1), rows(1))
        return module, float(fit.callback_metrics["loss"])

    plain, loss = fitted()
    budget = MemoryBudget("1100KiB")
    with caplog.at_level("INFO"):
        module, found = fitted(ActivationCheckpointing("full", blocks=["Block"]), budget)
    assert found == pytest.approx(loss, abs=1e-10)
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert float((ours - theirs).detach().abs().max()) <= 1e-11
    assert budget.sizing is not None
    assert budget.sizing.chunk_tokens is not None
    assert any("validation_step: a row does not fit at once" in one.getMessage() for one in caplog.records)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_on_two_ranks(strategy: str, tmp_path: Path) -> None:
    path = tmp_path / "found.pt"
    done = run_on_ranks("tests.plugins.evaluated_on_ranks", str(path), strategy)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (done.stdout + done.stderr).count("a row does not fit at once") == 2  # once for each hook
    for rank in range(2):
        for kind, (plain, within) in torch.load(f"{path}.{rank}").items():
            assert torch.allclose(within, plain, rtol=1e-12, atol=0), kind

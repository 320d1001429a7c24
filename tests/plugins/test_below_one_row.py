"""MemoryBudget where one row does not fit: modules that take tokens one by one run in chunks of tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_memkit import ActivationCheckpointing, MemoryBudget
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from tests.plugins.failing_chunks import assert_goes_on_in_chunks, assert_retried_wherever_it_fails
from tests.plugins.noise import NOISE
from tests.plugins.test_within_modules import Negates
from tests.plugins.toys import trained, trainer, weights

pytestmark = NOISE
TOKENS, WIDTH, STEPS = 320, 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, -1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        x = x + self.out(attended)
        return x + self.mlp(x)


class LongRows(LightningModule):
    """A causal model over vectors; its loss is a mean over rows, or their negatives' (`pairs`)."""

    def __init__(self, depth: int = 3, *, pairs: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.pairs = pairs
        self.steps = 0

    def encoded(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.steps += 1
        out = self.encoded(batch["x"])
        if self.pairs:
            means = F.normalize(out.mean(1), dim=1)
            loss = F.cross_entropy(5 * means @ means.T, torch.arange(len(means)).flip(0))
        else:
            loss = F.mse_loss(out[:, :-1], batch["x"][:, 1:])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def rows(batch_size: int) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    data: Any = [
        {"x": x} for x in torch.randn(STEPS, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    ]
    return DataLoader(data, batch_size=batch_size)


def run(*callbacks: Callback, batch_size: int = 1, pairs: bool = False, **options: Any) -> tuple[Any, Any]:
    given = {"max_steps": STEPS, "data": rows(batch_size), "dtype": torch.float64, "precision": "64-true"}
    return trained(*callbacks, module=lambda: LongRows(pairs=pairs), **{**given, **options})


def peak_of_a_row() -> int:
    """The bytes that a step of one row takes, by a run that is free to take them."""
    budget = MemoryBudget("1GiB", micro_batch_size=1)
    run(budget, max_steps=1)
    return budget.peak_bytes


def below(bytes_: int, share: float) -> str:
    return f"{int(bytes_ * share) // 1024}KiB"


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.long
def test_a_budget_below_one_row_trains_with_the_unchunked_result(
    batch_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    plain, unbounded = run(batch_size=batch_size)
    budget = MemoryBudget(below(peak_of_a_row(), 0.75))
    with caplog.at_level("INFO"):
        module, fitted = run(budget, batch_size=batch_size)
    assert float((weights(module) - weights(plain)).abs().max()) <= 1e-11
    assert float(fitted.callback_metrics["loss"]) == pytest.approx(
        float(unbounded.callback_metrics["loss"]), abs=1e-10
    )
    assert budget.sizing is not None
    assert budget.sizing.micro_batch_size == 1
    tokens = budget.sizing.chunk_tokens
    assert tokens is not None
    assert tokens < TOKENS
    assert budget.peak_bytes <= budget.usable_bytes_on(torch.device("cpu"))
    assert [change.chunk_tokens for change in budget.history] == [tokens]
    said = [
        record.getMessage()
        for record in caplog.records
        if "a row does not fit at once" in record.getMessage()
    ]
    assert any(f"in chunks of {tokens} tokens" in text and "blocks.0.mlp" in text for text in said), said
    assert not any("forward" in vars(part) for part in module.modules())


@pytest.mark.long
def test_the_whole_batch_of_a_loss_that_compares_rows() -> None:
    plain, _ = run(batch_size=4, pairs=True)
    budget = MemoryBudget("1GiB", within="modules", micro_batch_size=1)
    run(budget, batch_size=4, pairs=True, max_steps=1)
    budget = MemoryBudget(below(budget.peak_bytes, 0.85))
    module, _ = run(budget, batch_size=4, pairs=True)
    assert float((weights(module) - weights(plain)).abs().max()) <= 1e-11
    assert budget.sizing is not None
    assert budget.sizing.chunk_rows == 1
    assert budget.sizing.chunk_tokens is not None
    assert module.steps == STEPS


def test_within_checkpointed_blocks() -> None:
    plain, _ = run()
    budget = MemoryBudget("1GiB", micro_batch_size=1)
    run(budget, ActivationCheckpointing("full"), max_steps=1)
    budget = MemoryBudget(below(budget.peak_bytes, 0.85))
    module, _ = run(budget, ActivationCheckpointing("full"))
    assert float((weights(module) - weights(plain)).abs().max()) <= 1e-11
    assert budget.sizing is not None
    assert budget.sizing.chunk_tokens is not None


def test_within_the_step_it_is_refused_as_before() -> None:
    with pytest.raises(BudgetError, match="A micro-batch of 1 needs"):
        run(MemoryBudget(below(peak_of_a_row(), 0.75), within="step"))


class WritesLater(LongRows):
    """Writes to what the MLP of its only block was given, which a second forward would need."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        mlp: Any = self.blocks.get_submodule("0.mlp")
        self.mlp = nn.Sequential(Negates(), *mlp.children())

    def encoded(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        out = self.mlp(x)
        x.add_(1)
        return out


def test_a_step_that_writes_to_an_input_later_does_not_run_in_chunks_and_the_error_says_so() -> None:
    def run_it(*callbacks: Callback) -> None:
        trained(
            *callbacks,
            module=WritesLater,
            data=rows(1),
            dtype=torch.float64,
            precision="64-true",
            max_steps=1,
        )

    budget = MemoryBudget("1GiB", micro_batch_size=1)
    run_it(budget)
    with pytest.raises(
        BudgetError, match="The step fails where .*mlp.* in chunks: is an input written to later"
    ):
        run_it(MemoryBudget(below(budget.peak_bytes, 0.75)))


def test_the_smallest_chunk_that_does_not_fit_is_named() -> None:
    with pytest.raises(BudgetError, match="A micro-batch of 1 with modules in chunks of 2 tokens needs"):
        run(MemoryBudget(below(peak_of_a_row(), 0.3)))


@pytest.mark.long
def test_a_run_goes_on_in_the_chunks_of_the_one_it_resumes(tmp_path: Path) -> None:
    def resumed(first: Callable[[], list[Callback]], then: list[Callback]) -> Tensor:
        _, half = run(*first())  # an epoch
        half.save_checkpoint(tmp_path / "half.ckpt")
        torch.manual_seed(0)
        module = LongRows().double()
        fitted = trainer(*then, max_steps=STEPS + 2, gradient_clip_val=0.5, precision="64-true")
        fitted.fit(module, rows(1), ckpt_path=str(tmp_path / "half.ckpt"))
        return weights(module)

    budget = MemoryBudget("64MiB")  # in which a row would fit
    small = below(peak_of_a_row(), 0.75)
    found = resumed(lambda: [MemoryBudget(small)], [budget])
    assert budget.sizing is not None
    assert budget.sizing.chunk_tokens is not None
    assert len(budget.sizing.trials) == 1
    assert float((found - resumed(lambda: [], [])).abs().max()) <= 1e-11


@pytest.mark.long
def test_an_allocation_that_fails_anywhere_is_retried_in_smaller_chunks() -> None:
    assert_retried_wherever_it_fails(run, below(peak_of_a_row(), 0.75), "chunk_tokens", 8)


def test_a_row_that_fit_until_it_ran_out_of_memory_goes_on_in_chunks() -> None:
    assert_goes_on_in_chunks(run, "chunk_tokens", TOKENS // 2)

"""Plans where no row fits: modules that take tokens one by one run in chunks, as `MemoryBudget` finds them."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memkit import Budget, MemoryBudget, plan
from tests.plugins.noise import NOISE
from tests.plugins.test_below_one_row import TOKENS, WIDTH, LongRows

pytestmark = NOISE
GIVEN: dict[str, Any] = {"precision": "32-true"}


def batch(rows: int = 2) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))}


@pytest.mark.long
def test_a_row_that_does_not_fit_is_planned_in_chunks_and_trains_as_predicted() -> None:
    budget = Budget("770KiB")
    found = plan(LongRows(), batch(), budget, trainer=GIVEN)
    best = found.best
    assert best.chunk_tokens is not None
    assert 1 < best.chunk_tokens < TOKENS
    assert f"1 row at a time, modules in chunks of {best.chunk_tokens} tokens" in str(found)
    without = [row for row in found.rows if not row.fits and row.taken_bytes and row.chunk_tokens is None]
    assert min(row.taken_bytes for row in without) > budget.usable_bytes()
    arguments = found.trainer_kwargs()
    trainer = Trainer(
        **arguments, max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    data: Any = [{"x": row} for row in batch(4)["x"]]
    trainer.fit(LongRows(), DataLoader(data, batch_size=2))
    (kept,) = (one for one in arguments["callbacks"] if isinstance(one, MemoryBudget))
    assert kept.sizing is not None
    assert kept.sizing.chunk_tokens == best.chunk_tokens
    rest = 6 << 10  # what a trial itself holds: the state of a generator
    assert best.taken_bytes <= kept.peak_bytes <= best.taken_bytes + rest


class OnlyAttention(LongRows):
    """Blocks without MLPs: what is left in them mixes tokens, or saves less than it gives."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.mlp = nn.Identity()


def test_where_no_module_takes_tokens_one_by_one_nothing_fits() -> None:
    found = plan(OnlyAttention(), batch(), Budget("150KiB"), trainer=GIVEN)
    assert not found.fitting
    assert any(row.taken_bytes and row.micro_batch_size == 1 for row in found.rows)
    assert not any(row.chunk_tokens for row in found.rows)

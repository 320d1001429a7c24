"""Plans for losses over the batch: it stays whole, and modules run in chunks of its rows, as in the run."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from examples.contrastive.model import TwoTowers
from lightning_memkit import ActivationCheckpointing, Budget, MemoryBudget, Plan, plan
from tests.plugins.noise import NOISE

pytestmark = NOISE
ROWS = 64


def towers() -> TwoTowers:
    return TwoTowers(width=64, layers=2, longest=(16, 32))


def batch(rows: int = ROWS) -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(0)
    return {
        "query": torch.randint(0, 256, (rows, 16), generator=numbers),
        "answer": torch.randint(0, 256, (rows, 32), generator=numbers),
    }


def planned(budget: str, size: Any = "auto", *callbacks: Any) -> Plan:
    keeps = MemoryBudget(budget, micro_batch_size=size, within="modules")
    return plan(
        towers, batch(), Budget(budget), trainer={"precision": "32-true", "callbacks": [keeps, *callbacks]}
    )


def fitted(found: Plan) -> MemoryBudget:
    """The budget of a run as planned."""
    arguments = found.trainer_kwargs()
    trainer = Trainer(
        **arguments, max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    given, twice = batch(), range(2 * ROWS)
    data: Any = [{name: value[row % ROWS] for name, value in given.items()} for row in twice]
    trainer.fit(towers(), DataLoader(data, batch_size=ROWS))
    (kept,) = (one for one in arguments["callbacks"] if isinstance(one, MemoryBudget))
    return kept


def test_the_rows_of_a_chunk_are_those_of_the_run_and_so_is_the_peak() -> None:
    found = planned("6MiB", "auto", ActivationCheckpointing("full"))
    best = found.best
    assert best.chunk_rows is not None
    assert 1 < best.chunk_rows < ROWS
    assert f"all {ROWS} rows at once, modules in chunks of {best.chunk_rows} rows" in str(found)
    assert "its chunk of rows is found by itself" in str(found)
    kept = fitted(found)
    assert kept.sizing is not None
    assert kept.sizing.chunk_rows == best.chunk_rows
    assert kept.peak_bytes == pytest.approx(best.taken_bytes, rel=0.005)


def test_what_fits_whole_needs_no_chunks_and_what_does_not_fit_is_told_by_its_smallest() -> None:
    full = ActivationCheckpointing("full")
    assert planned("20MiB", "auto", full).best.chunk_rows is None
    (row,) = planned("3MiB", "auto", full).rows
    assert not row.fits
    assert "modules in chunks of 1 row: " in row.rejected


def test_a_chunk_that_was_given_is_kept() -> None:
    found = planned("20MiB", 8, ActivationCheckpointing("full"))
    assert [row.chunk_rows for row in found.rows] == [8]
    assert "its chunk of rows kept" in str(found)

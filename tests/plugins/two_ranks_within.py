"""Run on ranks by test_two_ranks_within.py: a loss over each rank's batch under DDP, its modules in chunks."""

import sys
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from lightning_memkit.memory.meter import ByteMeter
from tests.plugins.ranks import leave
from tests.plugins.test_below_one_row import TOKENS, LongRows
from tests.plugins.test_below_one_row import WIDTH as ROW_WIDTH
from tests.plugins.test_within_modules import ROWS, WIDTH, Pairs
from tests.plugins.toys import trainer, weights

STEPS = 5
BUDGET = "915KiB"  # DDP makes its buckets anew in the second forward, be it of a trial


class FailsOnOne(MemoryBudget):
    """Rank 1 runs out of memory in one step."""

    def drive(self, step: Any, optimize: Any) -> Any:
        fails = step.batch_idx == 2 and torch.distributed.get_rank() == 1
        with ByteMeter(fail_at=50 if fails else None):
            return super().drive(step, optimize)


def trained(*callbacks: Callback) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 16 * ROWS, WIDTH, generator=generator, dtype=torch.float64)
    data: Any = [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]
    torch.manual_seed(0)
    module = Pairs().double()
    fitted = trainer(*callbacks, max_steps=STEPS, devices=2, strategy="ddp", precision="64-true")
    fitted.fit(module, DataLoader(data, batch_size=ROWS))
    assert module.rows == [ROWS] * STEPS
    return weights(module)


def trained_on_long_rows(*callbacks: Callback) -> Tensor:
    """Rows of which one does not fit, two on each rank, unequal on the ranks."""
    generator = torch.Generator().manual_seed(1)
    data: Any = [
        {"x": x} for x in torch.randn(16, TOKENS, ROW_WIDTH, generator=generator, dtype=torch.float64)
    ]
    torch.manual_seed(0)
    module = LongRows().double()
    fitted = trainer(*callbacks, max_steps=3, devices=2, strategy="ddp", precision="64-true")
    fitted.fit(module, DataLoader(data, batch_size=2))
    return weights(module)


def main(path: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    budget, failing = MemoryBudget(BUDGET), FailsOnOne(BUDGET)
    found = {"plain": trained(), "chunks": trained(budget), "failed": trained(failing)}
    sizes = [[change.chunk_rows for change in one.history] for one in (budget, failing)]
    of_a_row = MemoryBudget("1GiB", micro_batch_size=1)
    trained_on_long_rows(of_a_row)
    below, failing_below = (
        kind(f"{of_a_row.peak_bytes * 3 // 4096}KiB") for kind in (MemoryBudget, FailsOnOne)
    )
    found |= {"plain rows": trained_on_long_rows(), "tokens": trained_on_long_rows(below)}
    found["failed tokens"] = trained_on_long_rows(failing_below)
    sizes += [[change.chunk_tokens for change in one.history] for one in (below, failing_below)]
    torch.save(
        {**found, "sizes": sizes, "retries": failing.retries}, f"{path}.{torch.distributed.get_rank()}"
    )
    leave()


if __name__ == "__main__":
    main(sys.argv[1])

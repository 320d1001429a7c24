"""Run on ranks by test_two_ranks_within.py: losses over batches, and rows that don't fit, under FSDP2."""

import sys
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memkit import FSDP2Strategy, MemoryBudget
from lightning_memkit.distributed.collectives import collectives_issued
from tests.plugins.ranks import leave, whole
from tests.plugins.test_below_one_row import TOKENS, LongRows
from tests.plugins.test_below_one_row import WIDTH as ROW_WIDTH
from tests.plugins.test_within_modules import WIDTH, Pairs, clip
from tests.plugins.toys import trainer
from tests.plugins.two_ranks_within import FailsOnOne

ROWS, STEPS = 128, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))


class ShardedPairs(Pairs):
    """Two towers of blocks, which FSDP2 gathers one by one.

    Args:
        gathers: negatives are those of all ranks.
    """

    def __init__(self, *, gathers: bool = False) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(*(Block() for _ in range(2))) for _ in range(2))
        if gathers:
            self.loss = self.over_all

    def over_all(self, one: Tensor, other: Tensor) -> Tensor:
        both: Any = self.all_gather((one, other), sync_grads=True)
        return clip(*(part.flatten(0, 1) for part in both))


class Collectives(Callback):
    """How many collectives the last batch takes."""

    count = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self._before = collectives_issued()

    def on_train_batch_end(self, *_: Any) -> None:
        now = collectives_issued()
        assert now is not None
        assert self._before is not None
        self.count = now - self._before


def trained(*callbacks: Callback, gathers: bool = False, ranks: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, STEPS * ranks * ROWS, WIDTH, generator=generator, dtype=torch.float64)
    data: Any = [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]
    torch.manual_seed(0)
    module = ShardedPairs(gathers=gathers).double()
    fit(module, DataLoader(data, batch_size=ROWS), callbacks, ranks)
    assert module.rows == [ROWS] * STEPS
    return weights(module)


def trained_on_long_rows(*callbacks: Callback, ranks: int) -> dict[str, Tensor]:
    """Rows of which one does not fit, two on each rank."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * ranks * 2, TOKENS, ROW_WIDTH, generator=generator, dtype=torch.float64)
    data: Any = [{"x": row} for row in x]
    torch.manual_seed(0)
    module = LongRows().double()
    fit(module, DataLoader(data, batch_size=2), callbacks, ranks)
    return weights(module)


def fit(module: Any, data: DataLoader, callbacks: tuple[Callback, ...], ranks: int) -> None:
    strategy: Any = FSDP2Strategy()
    options: Any = {"max_steps": STEPS, "devices": ranks, "strategy": strategy}
    trainer(*callbacks, **options).fit(module, data)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(one) for name, one in module.named_parameters()}


def main(path: str, ranks: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    wide, sizes, plain = MemoryBudget("1GiB"), {}, Collectives()
    found = {"plain": trained(wide, plain, ranks=ranks)}
    gathers = {"plain": plain.count}
    below = f"{wide.peak_bytes * 3 // 4096}KiB"
    for name, budget in (("chunks", MemoryBudget(below)), ("failed", FailsOnOne(below))):
        collectives = Collectives()
        found[name] = trained(budget, collectives, ranks=ranks)
        gathers[name] = collectives.count
        sizes[name] = [change.chunk_rows for change in budget.history]
    wide = MemoryBudget("1GiB")
    found["plain gathered"] = trained(wide, gathers=True, ranks=ranks)
    gathered = MemoryBudget(f"{wide.peak_bytes * 9 // 10240}KiB")  # scores of all ranks are most of it
    found["gathered"] = trained(gathered, gathers=True, ranks=ranks)
    sizes["gathered"] = [change.chunk_rows for change in gathered.history]
    of_a_row = MemoryBudget("1GiB", micro_batch_size=1)
    trained_on_long_rows(of_a_row, ranks=ranks)
    below = f"{of_a_row.peak_bytes * 3 // 4096}KiB"
    found["plain rows"] = trained_on_long_rows(ranks=ranks)
    for name, budget in (("tokens", MemoryBudget(below)), ("failed tokens", FailsOnOne(below))):
        found[name] = trained_on_long_rows(budget, ranks=ranks)
        sizes[name] = [change.chunk_tokens for change in budget.history]
    torch.save({**found, "sizes": sizes, "gathers": gathers}, f"{path}.{torch.distributed.get_rank()}")
    leave()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""Run by torchrun in test_two_ranks_evaluation.py: validates on two ranks, whole and in parts; saves both results."""

import sys
import warnings
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from lightning_memkit.plugins._evaluation import keep_budget_in_evaluation
from lightning_memkit.plugins._options import BudgetOptions
from tests.plugins.ranks import leave
from tests.plugins.toys import tagged_rows, trainer
from tests.plugins.two_ranks import ShardableTagger, Sharded

warnings.simplefilter("ignore")


def evaluating(base: type[ShardableTagger]) -> ShardableTagger:
    class Evaluated(base):  # pyright: ignore[reportGeneralTypeIssues]
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = MulticlassAccuracy(50, ignore_index=-100)

        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            SEEN.append(len(batch["x"]))
            logits = self.head(self.mix(self.embedding(batch["x"]))[0]).flatten(0, 1)
            self.log("loss", F.cross_entropy(logits, batch["labels"].flatten()), sync_dist=True)
            self.accuracy(logits, batch["labels"].flatten())
            self.log("accuracy", self.accuracy)

    torch.manual_seed(0)
    return Evaluated().double()


SEEN: list[int] = []


def main(path: str, strategy: str, size: str) -> None:
    torch.set_num_threads(1)
    results: list[Any] = []
    for split in (False, True):
        kinds: dict[str, Any] = {"ddp": "ddp", "fsdp2": ModelParallelStrategy(2, 1)}
        quiet = trainer(devices=2, strategy=kinds[strategy], use_distributed_sampler=False)
        micro_batch_size: Any = size if size == "auto" else int(size)
        options = BudgetOptions(
            budget_bytes=60_000 if size == "auto" else 2**30, micro_batch_size=micro_batch_size, headroom=0.0
        )
        if split:
            keep_budget_in_evaluation(quiet, options)
        module = evaluating(Sharded if strategy == "fsdp2" else ShardableTagger)
        # Under DDP the ranks' batches are of unequal sizes and numbers; sharding needs as many on each.
        rows = tagged_rows(40)[: 21 if strategy == "ddp" else 16] if quiet.global_rank else tagged_rows(16)
        del SEEN[:]
        data = DataLoader(rows, batch_size=8)  # pyright: ignore[reportArgumentType]
        if strategy == "ddp" and quiet.global_rank == 0:
            data = DataLoader([*rows, *rows[:5]], batch_size=7)  # pyright: ignore[reportArgumentType]
        results.append((quiet.validate(module, data, verbose=False), list(SEEN)))
    if quiet.global_rank == 0:
        torch.save(results, path)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])

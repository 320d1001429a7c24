"""Run on ranks by test_evaluation_below_one_row.py: rows that don't fit, one on each rank, under DDP or FSDP2."""

import sys
import warnings
from typing import Any

import torch

from lightning_memkit import FSDP2Strategy, MemoryBudget
from tests.plugins.ranks import leave
from tests.plugins.test_evaluation_below_one_row import made, peak_of_a_row, result


def main(path: str, strategy: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # FSDP2 takes no other precision, and leaves the weights as they are.
    options: Any = {"devices": 2, "precision": "32-true"}

    def found(kind: str, *callbacks: Any) -> torch.Tensor:
        options["strategy"] = FSDP2Strategy() if strategy == "fsdp2" else strategy
        return result(kind, made(), *callbacks, **options)

    below = f"{int(0.8 * peak_of_a_row(made())) // 1024}KiB"
    values = {kind: (found(kind), found(kind, MemoryBudget(below))) for kind in ("validate", "test")}
    torch.save(values, f"{path}.{torch.distributed.get_rank()}")
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])

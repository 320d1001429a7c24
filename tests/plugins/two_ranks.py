"""Run by torchrun in test_two_ranks.py: trains a TokenTagger under DDP and saves rank 0's weights."""

import sys

import torch
from torch.utils.data import DataLoader

from lightning_memkit import MemoryBudget
from tests.plugins.toys import TokenTagger, tagged_rows, trainer, weights


def main(path: str, micro_batch_size: int) -> None:
    torch.set_num_threads(1)
    callbacks = [MemoryBudget("1GiB", micro_batch_size=micro_batch_size)] if micro_batch_size else []
    fitted = trainer(*callbacks, max_steps=10, devices=2, strategy="ddp", gradient_clip_val=0.5,
                     use_distributed_sampler=False)  # fmt: skip
    torch.manual_seed(0)
    module = TokenTagger().double()
    # Rank 0 holds the rows with few labels: ranks must weigh by what they hold together.
    rows = tagged_rows(80)
    steps = [
        sorted(rows[i : i + 8], key=lambda row: int((row["labels"] != -100).sum())) for i in range(0, 80, 8)
    ]
    mine = [row for step in steps for row in step[4 * fitted.global_rank : 4 * fitted.global_rank + 4]]
    fitted.fit(module, DataLoader(mine, batch_size=4))  # pyright: ignore[reportArgumentType]
    gathered = [torch.empty_like(weights(module)) for _ in range(2)]
    torch.distributed.all_gather(gathered, weights(module))
    if fitted.global_rank == 0:
        torch.save({"weights": gathered[0], "spread": (gathered[0] - gathered[1]).abs().max()}, path)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # gloo's threads abort a process that exits without


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

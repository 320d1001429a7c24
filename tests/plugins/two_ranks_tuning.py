"""Run on ranks by test_two_ranks_tuning.py: both ranks tune by clocks of their own, then again from the cache."""

import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from lightning_memkit import MemoryBudget
from lightning_memkit.micro_batching.sizes import tuning
from lightning_memkit.utilities import cached_answers
from tests.plugins.ranks import leave
from tests.plugins.test_tuning import Classifier, Clock, data
from tests.plugins.toys import trainer, weights

# Seconds a sample by size: rank 0 alone would choose 32, rank 1 alone 4; the slower of the two is fastest at 16.
SECONDS = ({32: 1.0, 16: 1.1, 8: 1.2, 4: 1.4}, {32: 1.4, 16: 1.1, 8: 1.05, 4: 1.0})


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    clock, rank = Clock(), int(os.environ["RANK"])
    tuning.perf_counter = clock
    # Ranks on several hosts have caches of their own: rank 0's is the one that counts.
    cached_answers.cache_folder = lambda: folder / f"cache {rank}"

    class Clocked(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            clock.now += len(batch[1]) * SECONDS[rank].get(len(batch[1]), 2.0)
            return super().training_step(batch, batch_idx)

    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        module, budget = Clocked(), MemoryBudget("1GiB")
        fitted = trainer(budget, max_steps=50, devices=2, strategy="ddp", use_distributed_sampler=False)
        fitted.fit(module, data(batches=50))
        assert budget.sizing is not None
        runs.append(
            {
                "history": budget.history,
                "tried": [trial.micro_batch_size for trial in budget.sizing.trials],
                "weights": weights(module).tolist(),
            }
        )
    (folder / f"{rank}.json").write_text(json.dumps(runs))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

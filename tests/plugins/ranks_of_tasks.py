"""Run on two ranks by test_ranks_of_tasks.py: each rank's rows are of other tasks."""

import sys
import warnings
from collections.abc import Sequence

import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit import MemoryBudget
from tests.plugins.ranks import leave
from tests.plugins.test_rows_of_one_task import LOSSES, ROWS, DataSets
from tests.plugins.toys import trainer, weights

NONE = -1  # a row that no task has
BATCHES = {
    "a and b, b and c": [[0, 1, 0, 1], [1, 2, 1, 2]],
    "b and c, a and b": [[1, 2, 1, 2], [0, 1, 0, 1]],
    "a, b": [[0, 0, 0, NONE], [1, NONE, 1, NONE]],
    "a and b, c": [[0, 1, 0, 1], [2] * 4],
    "both of both": [[0, 1, 1, 1], [1, 0, 0, 1]],
    "other numbers": [[0, 1, 1, 1], [0, 1, 0, 1]],
}
STEPS = 4


def rows_of(ranks: Sequence[Sequence[int]]) -> list[TensorDataset]:
    """The data of each rank, and of both."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS, ROWS, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(STEPS, ROWS, generator=generator, dtype=torch.float64)
    tasks = torch.tensor([*ranks[0], *ranks[1]]).double().expand(STEPS, -1)
    targets = torch.stack([tasks, y], dim=2)
    halves = [slice(0, 4), slice(4, 8), slice(0, 8)]
    return [TensorDataset(x[:, own].flatten(0, 1), targets[:, own].flatten(0, 1)) for own in halves]


def fitted(loss: str, batches: str, size: int, devices: int = 2) -> torch.Tensor | str:
    """The trained weights, or why nothing was trained."""
    torch.manual_seed(0)
    toy = DataSets(LOSSES[loss]).double()
    budget = [MemoryBudget("1GiB", micro_batch_size=size, within="step")] if size else []
    of_all = trainer(
        *budget,
        max_epochs=1,
        max_steps=-1,
        use_distributed_sampler=False,
        devices=devices,
        strategy="ddp_find_unused_parameters_true" if devices > 1 else "auto",
    )
    data = rows_of(BATCHES[batches])[of_all.global_rank if devices > 1 else 2]
    try:
        of_all.fit(toy, DataLoader(data, ROWS // devices))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return weights(toy)


def main(path: str, loss: str, *sizes: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {batches: [fitted(loss, batches, size) for size in (0, *map(int, sizes))] for batches in BATCHES}
    torch.save(found, f"{path}.{torch.distributed.get_rank()}")
    leave()


if __name__ == "__main__":
    main(sys.argv[1], *sys.argv[2:])

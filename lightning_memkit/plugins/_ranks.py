"""What ranks must agree on before they go on, so that their collectives pair up."""

from collections.abc import Sequence

import torch
from lightning.pytorch import Trainer


def largest_of_ranks(trainer: Trainer, values: Sequence[float]) -> list[float]:
    """Each value's maximum over all ranks, exact for integers below 2**53."""
    if trainer.world_size == 1:
        return list(values)
    largest = torch.tensor(values, dtype=torch.float64, device=trainer.strategy.root_device)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return largest.tolist()


def any_rank(trainer: Trainer, truth: bool) -> bool:
    """Whether it holds on at least one rank."""
    return largest_of_ranks(trainer, [float(truth)])[0] > 0

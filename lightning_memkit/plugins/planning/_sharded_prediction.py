"""What a prediction for many ranks gives Lightning: a cluster of one process, and DDP without a reducer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ddp as lightning_ddp

from lightning_memkit.prediction.buckets import BucketedModel
from lightning_memkit.prediction.ranks import RankSimulation


class OneOfMany(LightningEnvironment):
    """Rank 0 of a cluster that launches no processes.

    Args:
        ranks: how many there are.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks

    @property
    def creates_processes_externally(self) -> bool:
        """True, so that Lightning starts no other processes."""
        return True

    def world_size(self) -> int:
        """The number of all ranks."""
        return self._ranks

    def set_world_size(self, size: int) -> None:
        """Do nothing: the number is known."""

    def global_rank(self) -> int:
        """0: the first rank."""
        return 0

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the rank is known."""

    def local_rank(self) -> int:
        """0: the first rank."""
        return 0

    def node_rank(self) -> int:
        """0: the first node."""
        return 0


@contextmanager
def ddp_in_buckets(simulation: RankSimulation) -> Iterator[None]:
    """Within the context, Lightning wraps modules into DDP's stand-in."""
    lightning: Any = lightning_ddp

    class Bucketed(BucketedModel):
        communicating = staticmethod(simulation.communicating)

    before, lightning.DistributedDataParallel = lightning.DistributedDataParallel, Bucketed
    try:
        yield
    finally:
        lightning.DistributedDataParallel = before

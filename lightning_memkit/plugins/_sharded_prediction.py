"""What a prediction for many ranks gives Lightning: a cluster of one process, and modules that are sharded for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies import ddp as lightning_ddp
from lightning.pytorch.trainer.states import TrainerFn

from lightning_memkit.distributed.sharding import Sharding, shard_blocks
from lightning_memkit.prediction.buckets import BucketedModel
from lightning_memkit.prediction.ranks import RankSimulation

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class ShardedStrategy(ModelParallelStrategy):
    """FSDP2 for a LightningModule as it is: its blocks are found and sharded over all ranks.

    Args:
        sharding: stage and blocks.
    """

    def __init__(self, sharding: Sharding) -> None:
        super().__init__(tensor_parallel_size=1)
        self._sharding = sharding

    def setup_environment(self) -> None:
        """Make the mesh: all ranks in one dimension."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Cast, shard, and only then make the optimizers."""
        assert self.model is not None
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        module = self.lightning_module
        assert isinstance(module, LightningModule)
        methods = [name for name in _STEPS if callable(getattr(module, name, None))]
        shard_blocks(module, self.device_mesh["data_parallel"], self._sharding, forward_methods=methods)
        self.model_to_device()
        self.barrier()
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fits:
            _optimizers_to_device(self.optimizers, self.root_device)


class OneOfMany(LightningEnvironment):
    """Rank 0 of a cluster that launches nothing.

    Args:
        ranks: how many there are.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks

    @property
    def creates_processes_externally(self) -> bool:
        """True: Lightning starts no process for the others."""
        return True

    def world_size(self) -> int:
        """All of them."""
        return self._ranks

    def set_world_size(self, size: int) -> None:
        """Known already."""

    def global_rank(self) -> int:
        """The first."""
        return 0

    def set_global_rank(self, rank: int) -> None:
        """Known already."""

    def local_rank(self) -> int:
        """The first."""
        return 0

    def node_rank(self) -> int:
        """The first."""
        return 0


@contextmanager
def ddp_in_buckets(simulation: RankSimulation) -> Iterator[None]:
    """Within it Lightning wraps modules into DDP's stand-in."""
    lightning: Any = lightning_ddp

    class Bucketed(BucketedModel):
        communicating = staticmethod(simulation.communicating)

    before, lightning.DistributedDataParallel = lightning.DistributedDataParallel, Bucketed
    try:
        yield
    finally:
        lightning.DistributedDataParallel = before

"""FSDP2 for any LightningModule: find its blocks, cast, shard, and only then make the optimizers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_memkit.checkpoints.atomic import recover, remove
from lightning_memkit.checkpoints.places import folder_of_ranks, place_of, remove_place
from lightning_memkit.checkpoints.sharded import is_sharded
from lightning_memkit.distributed.own_group import own_group
from lightning_memkit.distributed.sharding import Sharding, shard_blocks
from lightning_memkit.distributed.timeouts import give_timeout
from lightning_memkit.initialization.building import build_empty, build_on
from lightning_memkit.initialization.materialization import materialize
from lightning_memkit.plugins.misplaced import NoCallback
from lightning_memkit.plugins.seams import strategy
from lightning_memkit.plugins.strategies import _sharded_checkpoints
from lightning_memkit.plugins.strategies._eight_bit import adapt_bitsandbytes_in
from lightning_memkit.plugins.strategies.checkpoint_io import StreamingCheckpointIO
from lightning_memkit.plugins.strategies.on_device import (
    add_random_state,
    parameter_dtype,
    tell_epoch,
)

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class FSDP2Strategy(NoCallback, ModelParallelStrategy):
    """Each of n ranks keeps 1/n of weights, gradients and optimizer states, and gathers blocks when needed.

    It works with any LightningModule, without changes: repeated blocks are found and sharded with `fully_shard`, and
    the rest as one unit. Optimizers are made afterwards, from the sharded parameters. A module that shards itself in
    `configure_model` is left unchanged. By default all ranks of all nodes share one copy of the model. The price:
    every block is gathered twice a step (stage 2: once) and its gradients are reduced, which overlaps with
    computation if the links are fast. On one device it serves to offload parameters and gradients.
    `Trainer(strategy="memkit_fsdp2")` works once this class is imported. Not yet verified on a GPU.

    Args:
        stage: the ZeRO stage. 3 frees a block's gathered weights after its forward; 2 keeps them until its backward.
        blocks: the blocks to use instead of those found: globs over module names (`encoder.layers.*`) and
            class names.
        replicas: how many copies of the model there are (hybrid sharding); `"nodes"`: one on each node, so
            that weights are gathered within a node, and only gradients cross the network.
        cpu_offload: keep shards of weights, gradients and states in host memory, and run the optimizer on the CPU.
        mixed_precision: the dtypes in which weights are gathered and used (`param_dtype`) and gradients
            reduced (`reduce_dtype`); by default the dtype of the weights.
        save_distributed_checkpoint: each rank writes its shard into a folder; otherwise rank 0 writes one file.
        process_group_backend: as in Lightning; by default NCCL on CUDA and gloo on the CPU.
        timeout: of collectives.

    Raises:
        ValueError: an argument is outside its range, the number of ranks is not divisible by `replicas`, or
            (at setup) an optimizer holds parameters from before sharding, or belongs to bitsandbytes.

    Source: torch.distributed.fsdp.fully_shard; Rajbhandari et al., ZeRO, 2020, arXiv:1910.02054.
    """

    strategy_name = "memkit_fsdp2"

    def __init__(
        self,
        stage: int = 3,
        blocks: Sequence[str] | None = None,
        replicas: int | Literal["nodes"] = 1,
        cpu_offload: bool = False,
        mixed_precision: MixedPrecisionPolicy | None = None,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.sharding = Sharding(stage=stage, blocks=blocks, cpu_offload=cpu_offload)
        if replicas != "nodes" and (not isinstance(replicas, int) or replicas < 1):
            raise ValueError(f'replicas={replicas!r} is no number of copies; write 1, 2, ... or "nodes".')
        self.replicas: int | Literal["nodes"] = replicas
        self.mixed_precision = mixed_precision
        # Set by `InitialWeights`, and called once.
        self.initial_weights: Callable[[nn.Module, torch.device], None] | None = None

    def __repr__(self) -> str:
        sharding = self.sharding
        blocks = None if sharding.blocks is None else list(sharding.blocks)
        return (
            f"{type(self).__name__}(stage={sharding.stage}, blocks={blocks!r}, replicas={self.replicas!r}, "
            f"cpu_offload={sharding.cpu_offload}, mixed_precision={self.mixed_precision!r}, "
            f"save_distributed_checkpoint={self._save_distributed_checkpoint})"
        )

    def connect(self, model: LightningModule) -> None:
        """Attach the model, and add the callback that saves the random state in checkpoints."""
        super().connect(model)
        trainer = getattr(model, "_trainer", None)
        if isinstance(trainer, Trainer):
            add_random_state(trainer)

    def setup_environment(self) -> None:
        """Make the device mesh: all ranks take part in data parallelism."""
        ranks = self.num_nodes * self.num_processes
        copies = self.num_nodes if self.replicas == "nodes" else self.replicas
        if ranks % copies:
            raise ValueError(
                f"replicas={self.replicas!r} copies can't be spread over {ranks} ranks: they have to divide them."
            )
        self._data_parallel_size = ranks
        super().setup_environment()
        give_timeout(self.device_mesh)
        trainer = getattr(self.lightning_module, "_trainer", None)
        if ranks == 1 and isinstance(trainer, Trainer):
            strategy.keep_samplers(trainer)

    def setup(self, trainer: Trainer) -> None:
        """Cast, shard, and only then make the optimizers."""
        assert self.model is not None
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        assert isinstance(module, LightningModule)
        if self._save_distributed_checkpoint and _sharded_checkpoints.is_asynchronous(self.checkpoint_io):
            own_group()  # made now on all ranks; a thread will need it
        if not any(parameter.is_meta for parameter in module.parameters()):
            self._load_initial_weights(module)  # before the cast, which may keep their low halves
        self.model = self.precision_plugin.convert_module(self.model)
        if not any(isinstance(part, FSDPModule) for part in module.modules()):
            whole = dict(module.named_parameters())
            methods = [name for name in _STEPS if callable(getattr(module, name, None))]
            shard_blocks(
                module,
                self.sharding_mesh,
                self.sharding,
                mixed_precision=self.mixed_precision,
                forward_methods=methods,
            )
            follow: Any = getattr(self.precision_plugin, "follow_sharding", None)
            if follow is not None:
                follow(whole, module)
        self._load_initial_weights(module)
        materialize(module, self._home)
        self.model_to_device()
        self.barrier()
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            self.setup_optimizers(trainer)
            _refuse_stale(self.optimizers, module)
            adapt_bitsandbytes_in(module, self.optimizers)  # refuses them: they can't step shards
        self.setup_precision_plugin()
        if fits and not self.sharding.cpu_offload:
            _optimizers_to_device(self.optimizers, self.root_device)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Modules made inside are on the device at the precision's dtype; if empty, without memory."""
        dtype = parameter_dtype(self.precision_plugin)
        if dtype is None:
            with super().tensor_init_context(empty_init):
                yield
            return
        build = build_empty if empty_init or self.initial_weights is not None else build_on
        with self.precision_plugin.tensor_init_context(), build(self.root_device, dtype):
            yield

    def _load_initial_weights(self, module: LightningModule) -> None:
        load, self.initial_weights = self.initial_weights, None
        if load is not None:
            load(module, self._home)

    @property
    def _home(self) -> torch.device:
        return torch.device("cpu") if self.sharding.cpu_offload else self.root_device

    def process_dataloader(self, dataloader: object) -> object:
        """Tell the sampler its epoch now: Lightning does so only after a resumed run has begun to read."""
        tell_epoch(self.lightning_module, dataloader)
        return dataloader

    @property
    def shards_by(self) -> Sharding:
        """How weights are sharded, for code that inspects strategies."""
        return self.sharding

    @property
    def sharding_mesh(self) -> DeviceMesh:
        """The ranks that share a copy; with several copies, the first dimension counts the copies."""
        copies = self.num_nodes if self.replicas == "nodes" else self.replicas
        if copies == 1:
            return self.device_mesh["data_parallel"]
        shape = (copies, self.world_size // copies)
        mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("replicate", "shard"))
        give_timeout(mesh)
        return mesh

    def model_to_device(self) -> None:
        """Move unsharded tensors to the device; shards are in place already."""
        assert self.model is not None
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if not isinstance(tensor, DTensor) and tensor.device != self.root_device:
                tensor.data = tensor.data.to(self.root_device)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write a folder with every rank's shard, or one file; the old one stays until it is complete."""
        path = self.broadcast(filepath)
        if not self._save_distributed_checkpoint:
            if self.is_global_zero:
                place = place_of(path, **(storage_options or {}))
                stock = not isinstance(self.checkpoint_io, StreamingCheckpointIO)
                if stock and isinstance(place, Path) and is_sharded(place):
                    remove(place)  # Lightning's CheckpointIO would write into the folder
                self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)
        elif storage_options is not None:
            raise TypeError(
                f"storage_options={storage_options!r} is for a CheckpointIO, and ranks that write together use none; "
                "set save_distributed_checkpoint=False."
            )
        else:
            _sharded_checkpoints.save(checkpoint, Path(path), self.checkpoint_io)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a folder or a file, whatever number of ranks saved it; nothing in it is executed."""
        path = self.broadcast(checkpoint_path)
        assert self.model is not None
        assert self.lightning_module is not None
        strict = self.lightning_module.strict_loading
        io = self.checkpoint_io
        if isinstance(io, StreamingCheckpointIO) and io.asynchronous:
            _sharded_checkpoints.wait_on_all_ranks(io)
        place = place_of(path)
        if isinstance(place, Path):
            recover(place)
        if place.is_dir() if isinstance(place, Path) else place[0].isdir(place[1]):
            folder = folder_of_ranks(path)
            return _sharded_checkpoints.load_folder(folder, self.model, self.optimizers, weights_only, strict)
        if weights_only is False and not isinstance(io, StreamingCheckpointIO):
            return super().load_checkpoint(path, weights_only=weights_only)
        io = io if isinstance(io, StreamingCheckpointIO) else StreamingCheckpointIO()
        checkpoint = io.load_checkpoint(path, weights_only=weights_only)
        return _sharded_checkpoints.load_file(checkpoint, self.model, self.optimizers, strict)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint; a folder is renamed first, and stays until pending writes are complete."""
        if not self.is_global_zero:
            return
        if self._save_distributed_checkpoint and not isinstance(self.checkpoint_io, StreamingCheckpointIO):
            remove_place(place_of(filepath))
        else:
            self.checkpoint_io.remove_checkpoint(filepath)

    def teardown(self) -> None:
        """Tear down as Lightning does, and wait for pending checkpoint writes."""
        super().teardown()
        self.checkpoint_io.teardown()

    def _get_process_group_backend(self) -> str:
        backend = super()._get_process_group_backend()
        # With offload, gradient norms are reduced on the CPU, which needs gloo.
        return "cpu:gloo,cuda:nccl" if self.sharding.cpu_offload and backend == "nccl" else backend


def _refuse_stale(optimizers: Sequence[Any], module: nn.Module) -> None:
    """Refuse optimizers made before sharding: their parameters are unused, so nothing would be trained."""
    own = set(module.parameters())
    stale = sum(parameter not in own for parameter in _parameters(optimizers))
    if stale:
        raise ValueError(
            f"{stale} parameter(s) of the optimizer are not the sharded module's, so that nothing would be trained: "
            "make the optimizer in configure_optimizers, from self.parameters(); with LightningCLI use memkit "
            "(MemkitCLI), which makes the config's optimizer there."
        )


def _parameters(optimizers: Sequence[Any]) -> Iterator[nn.Parameter]:
    return chain.from_iterable(
        group["params"] for optimizer in optimizers for group in optimizer.param_groups
    )


if FSDP2Strategy.strategy_name not in StrategyRegistry.available_strategies():
    StrategyRegistry.register(FSDP2Strategy.strategy_name, FSDP2Strategy)

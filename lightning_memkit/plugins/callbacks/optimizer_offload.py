"""The Lightning adapter of `offload_states`."""

from collections.abc import Callable

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

from lightning_memkit.memory.units import parse_bytes
from lightning_memkit.optim.offload import StateOffload, offload_of, offload_states
from lightning_memkit.plugins.asked import refuse_twin
from lightning_memkit.plugins.pickling import LeavesRunBehind, nothing
from lightning_memkit.plugins.seams.strategy import keep_states_in_place

# Strategies that hold or load optimizer states themselves, and their own way to offload them.
_OWN_OFFLOAD: dict[type, str] = {
    DeepSpeedStrategy: "DeepSpeedStrategy(offload_optimizer=True)",
    FSDPStrategy: "FSDPStrategy(cpu_offload=True)",
    ModelParallelStrategy: "fully_shard(..., offload_policy=CPUOffloadPolicy()) in configure_model",
}


class OptimizerOffload(LeavesRunBehind, Callback):
    """Optimizer states in host memory: 0 bytes a parameter on the device but for a few buckets during a step.

    This frees 8 bytes a parameter for AdamW in float32, and 6 under PureBF16Precision with compact states.
    Weights are bitwise those of the same run without it (on CUDA with `Trainer(deterministic=True)`). The
    price: every state is copied to the device and back in each step. It works with the optimizers of
    `configure_optimizers`; clipping, schedulers, manual optimization, checkpoints and resume are unchanged,
    and resuming takes no device memory for states. Checkpoints are interchangeable with those of a run
    without it.

    Args:
        bucket_bytes: Bytes of states that are copied together, as a size ("64MiB") or a count of bytes; three
            such buckets are on the device during a step. A parameter whose states are larger forms a bucket
            of its own.
        pin_memory: Keep states in page-locked host memory, without which copies are slow.

    Raises:
        ValueError: A size can't be parsed; at setup, the strategy holds the optimizer's states itself.
    """

    plan_column = "offload"
    offloads_states = True
    of_run = {"_offloads": list, "_undo_seam": lambda: nothing}

    def __init__(self, bucket_bytes: int | str = "64MiB", pin_memory: bool = True) -> None:
        parse_bytes(bucket_bytes)
        self.bucket_bytes = bucket_bytes
        self.pin_memory = pin_memory
        self._offloads: list[StateOffload] = []
        self._undo_seam: Callable[[], None] = nothing

    def __repr__(self) -> str:
        return f"OptimizerOffload(bucket_bytes={self.bucket_bytes!r}, pin_memory={self.pin_memory!r})"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse strategies that offload states themselves, and a second callback."""
        refuse_twin(trainer, self)
        for kind, instead in _OWN_OFFLOAD.items():
            if stage == "fit" and isinstance(trainer.strategy, kind):
                raise ValueError(
                    f"OptimizerOffload can't go with {type(trainer.strategy).__name__}, which holds the optimizer's "
                    f"states itself; use {instead}."
                )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Offload the optimizers, which exist by now; Lightning loads a checkpoint's states later."""
        size = parse_bytes(self.bucket_bytes)
        self._undo_seam = keep_states_in_place(trainer, lambda optimizer: offload_of(optimizer) is not None)
        self._offloads = [
            offload_states(optimizer, bucket_bytes=size, pin_memory=self.pin_memory)
            for optimizer in trainer.optimizers
        ]
        told = getattr(trainer.precision_plugin, "on_states_offloaded", None)
        if told is not None:
            told()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Undo here, too: Lightning calls no teardown after an error."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the optimizers' own steps; Lightning has moved the model to the host by now."""
        self._stop()

    def _stop(self) -> None:
        self._undo_seam()
        for offload in self._offloads:
            offload.undo(move=False)  # the device may be full, and no further step needs states there
        self._offloads, self._undo_seam = [], nothing

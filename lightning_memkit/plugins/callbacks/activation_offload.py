"""The Lightning adapter of `offload_activations`."""

import warnings
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_memkit.activations.blocks import refuse_single_pattern
from lightning_memkit.activations.offload import (
    ActivationsOffload,
    Choose,
    check_options,
    describe_choices,
    offload_activations,
)
from lightning_memkit.activations.offload_visits import in_host_memory
from lightning_memkit.plugins.pickling import LeavesRunBehind, nothing
from lightning_memkit.plugins.seams.bars import info
from lightning_memkit.utilities.errors import NoEffectWarning


class ActivationOffload(LeavesRunBehind, Callback):
    """Keeps the activations of all but about two blocks in host memory while fitting; each crosses twice a step.

    Loss and gradients stay bitwise the same (on CUDA with `Trainer(deterministic=True)`). Copies overlap with
    computation: a block's activations are copied to the host while the next block runs, and back while the
    next block's backward runs. Together with ActivationCheckpointing, the saved inputs of its blocks are
    offloaded. Blocks are found as ActivationCheckpointing finds them; models built late, in
    `configure_model`, are covered too. Everything is restored when fitting ends.

    Args:
        min_bytes: Saved tensors with a smaller storage stay on the device; a size ("1MiB") or a count of
            bytes.
        host_bytes: The most pinned host memory to use, as a size or a count of bytes; `auto` is half of the
            host memory that is free when fitting starts, and, when that limit is reached, half of what is
            free then in addition. Activations beyond the limit stay on the device, and a warning says so
            once.
        blocks: The blocks to use instead of those found: globs over module names (`encoder.layers.*`) and
            class names (`Llama*Layer`).
        pin_memory: Use page-locked host memory; without it copies are slow and don't overlap with
            computation.
        choose: `offload` moves every block's activations. `auto` times copies and the blocks' forwards in the
            first three steps; from then on blocks whose copies take longer than the next block's computation
            are checkpointed instead.

    Raises:
        ValueError: A size can't be parsed, the choice is unknown, or `blocks` is a single string instead of a
            list.
    """

    plan_column = "offload"
    of_run = {"_offload": nothing, "_began": bool, "_told": bool}

    def __init__(
        self,
        min_bytes: int | str = "1MiB",
        host_bytes: int | str = "auto",
        blocks: Sequence[str] | None = None,
        pin_memory: bool = True,
        choose: Choose = "offload",
    ) -> None:
        check_options(min_bytes, host_bytes, choose)
        if blocks is not None:
            refuse_single_pattern(blocks)
        self.min_bytes = min_bytes
        self.host_bytes = host_bytes
        self.blocks = None if blocks is None else list(blocks)
        self.pin_memory = pin_memory
        self.choose: Choose = choose
        self._offload: ActivationsOffload | None = None
        self._began = False
        self._told = False

    def __repr__(self) -> str:
        return (
            f"ActivationOffload(min_bytes={self.min_bytes!r}, host_bytes={self.host_bytes!r}, blocks={self.blocks!r}, "
            f"pin_memory={self.pin_memory!r}, choose={self.choose!r})"
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Patch a model that exists already, so that later hooks (such as a trial) see it patched."""
        if stage == "fit" and not is_overridden("configure_model", pl_module):
            self._patch(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Patch a model that `configure_model` has built."""
        if not self._began:
            self._patch(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report once what `choose="auto"` chose, or warn that nothing was offloaded."""
        if self._offload is None or self._told:
            return
        counts = self._offload.counts
        if not counts.visits:
            self._say_nothing_moved(
                "no block was called by itself: a model that is compiled as a whole runs none. Compile the blocks "
                "instead (`block.compile()`), before fitting"
            )
        elif not counts.moved_bytes and not counts.kept_bytes and not self._offload.stood_aside:
            self._say_nothing_moved(
                f"no tensor that a block saves has min_bytes={self.min_bytes!r}; write a smaller min_bytes"
            )
        elif self.choose == "auto" and self._offload.choices:
            info(trainer, f"ActivationOffload: {describe_choices(self._offload.choices)}")
        self._told = self.choose != "auto" or bool(self._offload.choices)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the blocks here, too: Lightning calls no teardown after an error."""
        self._restore()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the blocks and free the host memory."""
        self._restore()

    def _patch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = True
        device = trainer.strategy.root_device
        if in_host_memory(device):
            warnings.warn(
                f"ActivationOffload does nothing on {device.type}: activations are in the host's memory already. To "
                "keep fewer of them, use ActivationCheckpointing.",
                NoEffectWarning,
                stacklevel=2,
            )
            return
        self._offload = offload_activations(
            pl_module,
            min_bytes=self.min_bytes,
            host_bytes=self.host_bytes,
            blocks=self.blocks,
            pin_memory=self.pin_memory,
            choose=self.choose,
        )

    def _say_nothing_moved(self, why: str) -> None:
        self._told = True
        warnings.warn(f"ActivationOffload moved nothing: {why}.", NoEffectWarning, stacklevel=2)

    def _restore(self) -> None:
        if self._offload is not None:
            self._offload()
            self._offload = None
        self._began = self._told = False

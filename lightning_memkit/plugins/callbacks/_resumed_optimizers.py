"""Refuse to resume with another optimizer than the one that the checkpoint was written with."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.optim.foreign_states import SavedNames, why_foreign


class ResumedOptimizers(Callback):
    """Looks at the names of a checkpoint's optimizer states before they are loaded; keeps no tensor.

    Raises:
        CheckpointError: they are another optimizer's: torch would fail on the name of a state, here or in the first
            step.
    """

    watches_only = True

    def __init__(self) -> None:
        self._saved: list[SavedNames] = []

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Note them; compare at once under strategies that load after `on_fit_start`."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        saved = checkpoint.get("optimizer_states") or []
        self._saved = [SavedNames.of(one) for one in saved if isinstance(one, Mapping)]
        if trainer.strategy.restore_checkpoint_after_setup:
            self._compare(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare; Lightning loads them after this."""
        self._compare(trainer)

    def _compare(self, trainer: Trainer) -> None:
        saved, self._saved = self._saved, []
        for optimizer, names in zip(trainer.optimizers, saved, strict=False):
            if why := why_foreign(getattr(optimizer, "optim", optimizer), names):  # ZeRO's own is around it
                raise CheckpointError(
                    f"The checkpoint's optimizer states can't be resumed: {why}. Resume with the optimizer that wrote "
                    "it, or start anew from its weights alone (InitialWeights, or load_from_checkpoint)."
                )

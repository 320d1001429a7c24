"""Refuse to resume with another optimizer than the one that the checkpoint was written with."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_memkit.checkpoints.errors import CheckpointError
from lightning_memkit.optim.foreign_states import why_foreign


class ResumedOptimizers(Callback):
    """Looks at a checkpoint's optimizer states before they are loaded; costs nothing.

    Raises:
        CheckpointError: they are another optimizer's: torch would fail on the name of a state, here or in the first
            step.
    """

    watches_only = True

    def __init__(self) -> None:
        self._saved: list[Mapping[str, Any]] = []

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep them until the run's own optimizers are there."""
        saved = checkpoint.get("optimizer_states") or []
        self._saved = [one for one in saved if isinstance(one, Mapping)]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare; Lightning loads them after this."""
        saved, self._saved = self._saved, []
        for optimizer, states in zip(trainer.optimizers, saved, strict=False):
            if why := why_foreign(getattr(optimizer, "optim", optimizer), states):  # ZeRO's own is around it
                raise CheckpointError(
                    f"The checkpoint's optimizer states can't be resumed: {why}. Resume with the optimizer that wrote "
                    "it, or start anew from its weights alone (InitialWeights, or load_from_checkpoint)."
                )

"""The callbacks that a data module puts into its trainer for the time of a run."""

from typing import Any

import lightning.pytorch as pl

from lightning_memkit.plugins.asked import says
from lightning_memkit.plugins.callbacks.contamination import ContaminationProbe
from lightning_memkit.plugins.data._packing_log import PackingLog


class OwnCallbacks:
    """A log of what was packed, and where documents are to be kept apart the probe that tells whether they are."""

    def __init__(self) -> None:
        self.log, self.probe = PackingLog(), ContaminationProbe()

    def put_into(self, trainer: pl.Trainer, *, probing: bool) -> None:
        """Add what the trainer lacks; the probe only where it is wanted and the user gave none."""
        callbacks = _callbacks(trainer)
        if self.log not in callbacks:
            # Before ModelCheckpoint, which saves what the log knows of a stream.
            callbacks.insert(0, self.log)
        if probing and not any(says(callback, "probes_contamination") for callback in callbacks):
            callbacks.append(self.probe)

    def take_out_of(self, trainer: pl.Trainer) -> None:
        """Leave the trainer what it had."""
        callbacks = _callbacks(trainer)
        callbacks[:] = [callback for callback in callbacks if callback not in (self.log, self.probe)]


def _callbacks(trainer: pl.Trainer) -> list[Any]:
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]

"""The callbacks that a data module adds to its trainer for the duration of a run."""

from typing import Any

import lightning.pytorch as pl

from lightning_memkit.plugins.asked import says
from lightning_memkit.plugins.data._first_ids import FirstIds
from lightning_memkit.plugins.data._kept_apart import KeptApart
from lightning_memkit.plugins.data._packing_log import PackingLog


class OwnCallbacks:
    """A log of packing, a look at the first ids, and a contamination probe if documents must be kept apart."""

    def __init__(self) -> None:
        self.log, self.ids, self.probe = PackingLog(), FirstIds(), KeptApart()

    def put_into(self, trainer: pl.Trainer, *, probing: bool) -> None:
        """Add the callbacks that the trainer lacks; the probe if wanted, and the user added none."""
        callbacks = _callbacks(trainer)
        if self.log not in callbacks:
            # Before ModelCheckpoint: the log tells a stream which batch is in use, which checkpoints save.
            callbacks[:0] = [self.log, self.ids]
        if probing and not any(says(callback, "probes_contamination") for callback in callbacks):
            callbacks.append(self.probe)

    def take_out_of(self, trainer: pl.Trainer) -> None:
        """Remove these callbacks from the trainer."""
        self.probe.end()
        callbacks = _callbacks(trainer)
        own = (self.log, self.ids, self.probe)
        callbacks[:] = [callback for callback in callbacks if callback not in own]


def _callbacks(trainer: pl.Trainer) -> list[Any]:
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]

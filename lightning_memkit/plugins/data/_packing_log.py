"""What was packed and trained on, in the trainer's loggers; nothing on the steps between them."""

from typing import Any

import lightning.pytorch as pl

from lightning_memkit.data.loading.loader import PackedLoader
from lightning_memkit.data.loading.stream_loader import StreamLoader


class PackingLog(pl.Callback):
    """Logs fullness, documents, tokens and truncations every ``log_every_n_steps``; microseconds a batch.

    ``packing/efficiency`` is the share of real tokens since it was logged last; ``packing/documents`` and
    ``packing/tokens`` count from the beginning of training, over all ranks, epochs and resumes; what was truncated
    or split is of the data set, or of a stream as far as it was read.

    Attributes:
        loader: What is trained on; None before it is known.
    """

    def __init__(self) -> None:
        self.loader: PackedLoader | StreamLoader | None = None
        self._logged_step = 0
        self._last = (0, 0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Counts fullness from here."""
        self._logged_step = trainer.global_step
        if self.loader is not None:
            progress = self.loader.progress
            self._last = (progress.tokens, progress.room)

    def on_train_batch_start(self, *_: Any) -> None:
        """Tells a stream, of which Lightning draws one batch ahead, which batch is used."""
        if isinstance(self.loader, StreamLoader):
            self.loader.take()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Logs where the trainer's loggers are due."""
        every = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
        if every and trainer.global_step // every != self._logged_step // every:
            self._log(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs what came since."""
        if trainer.global_step != self._logged_step:
            self._log(trainer)

    def _log(self, trainer: pl.Trainer) -> None:
        self._logged_step = trainer.global_step
        if self.loader is None or not trainer.loggers:
            return
        progress, (tokens, room) = self.loader.progress, self._last
        if progress.room == room:
            return
        counts = self.loader.position if isinstance(self.loader, StreamLoader) else self.loader.rows.packing
        values = {
            "efficiency": (progress.tokens - tokens) / (progress.room - room),
            "documents": progress.documents,
            "tokens": progress.tokens,
            "truncated_documents": counts.truncated_documents,
            "truncated_tokens": counts.truncated_tokens,
        }
        self._last = (progress.tokens, progress.room)
        for logger in trainer.loggers:
            # Lightning counts the steps of what a module logs from 0.
            logger.log_metrics(
                {f"packing/{name}": float(value) for name, value in values.items()},
                step=trainer.global_step - 1,
            )

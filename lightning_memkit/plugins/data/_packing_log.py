"""Log what was packed and trained on; costs nothing on the steps between two log entries."""

from typing import Any

import lightning.pytorch as pl

from lightning_memkit.data.loading.loader import PackedLoader
from lightning_memkit.data.loading.stream_loader import StreamLoader


class PackingLog(pl.Callback):
    """Logs fullness, documents, tokens and truncations every ``log_every_n_steps``; microseconds a batch.

    ``packing/efficiency`` is the fraction of real tokens since the last log entry; ``packing/documents`` and
    ``packing/tokens`` count from the beginning of training, over all ranks, epochs and resumes; truncations
    are counted over the whole data set, or over a stream as far as it was read.

    Attributes:
        loader: The training loader; None before it exists.
    """

    def __init__(self) -> None:
        self.loader: PackedLoader | StreamLoader | None = None
        self._logged_step = 0
        self._last = (0, 0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start counting fullness here."""
        self._logged_step = trainer.global_step
        if self.loader is not None:
            progress = self.loader.progress
            self._last = (progress.tokens, progress.room)

    def on_train_batch_start(self, *_: Any) -> None:
        """Tell a stream which batch is in use: Lightning reads one batch ahead."""
        if isinstance(self.loader, StreamLoader):
            self.loader.take()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Log whenever the trainer's loggers are due."""
        every = trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
        if every and trainer.global_step // every != self._logged_step // every:
            self._log(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log what came since the last entry."""
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
            # Lightning numbers the steps of a module's logged values from 0.
            logger.log_metrics(
                {f"packing/{name}": float(value) for name, value in values.items()},
                step=trainer.global_step - 1,
            )

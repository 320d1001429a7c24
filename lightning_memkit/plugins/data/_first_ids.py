"""Names an embedding with fewer rows than the documents have token ids, in the first batch."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_memkit.data.sources.vocabulary import watch_embeddings
from lightning_memkit.utilities.patching import Undo


class FirstIds(Callback):
    """Watches a module's embeddings until a run's first batch is over; waits for the device in each of their calls.

    Attributes:
        bound: an upper bound (exclusive) of the documents' token ids; 0 if it is unknown, as of a stream.
        tokenizer: its name.
    """

    watches_only = True

    def __init__(self) -> None:
        self.bound, self.tokenizer = 0, ""
        self._undo: Undo | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin."""
        self._begin(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin; the check before training is the first to show the module any documents."""
        self._begin(pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin."""
        self._begin(pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin."""
        self._begin(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """End."""
        self._end()

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """End."""
        self._end()

    def on_test_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """End."""
        self._end()

    def on_predict_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """End."""
        self._end()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End, if there was no batch."""
        self._end()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End, if there was no batch."""
        self._end()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End, if there was no batch."""
        self._end()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End, if there was no batch."""
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave no hook behind."""
        self._end()

    def _begin(self, module: LightningModule) -> None:
        self._end()
        self._undo = watch_embeddings(module, self.bound, self.tokenizer)

    def _end(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None

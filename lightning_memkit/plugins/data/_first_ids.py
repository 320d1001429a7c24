"""Names a table or a head too small for the documents' token ids, in the first batch."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_memkit.data.sources.lookups import KnownIds
from lightning_memkit.data.sources.store import TokenStore
from lightning_memkit.data.sources.vocabulary import watch_lookups
from lightning_memkit.utilities.patching import Undo


class FirstIds(Callback):
    """Watches where a module looks token ids up, until a run's first batch is over; afterwards it costs nothing.

    Attributes:
        tokenizer: its name.
    """

    watches_only = True

    def __init__(self) -> None:
        self.tokenizer = ""
        self._bound = 0  # unknown, as of a stream
        self._stores: dict[int, TokenStore] = {}
        self._undo: Undo | None = None
        self._has_validated = False

    def add(self, store: TokenStore, bound: int) -> None:
        """Watch for these documents, too.

        Args:
            store: the documents.
            bound: an upper bound (exclusive) of their token ids, padding included.
        """
        self._bound = max(self._bound, bound)
        self._stores[id(store)] = store  # one for each loader, and loaders may be made anew every epoch

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch the first validation of this fit, too."""
        self._has_validated = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin."""
        self._begin(pl_module, "training_step")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin; the check before training is the first to show the module any documents."""
        if trainer.state.fn != TrainerFn.FITTING or not self._has_validated:
            self._begin(pl_module, "validation_step")
        self._has_validated = True

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin."""
        self._begin(pl_module, "test_step")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin."""
        self._begin(pl_module, "predict_step")

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

    def _begin(self, module: LightningModule, step: str) -> None:
        self._end()
        known = KnownIds(ids=self._bound, labels=self._labels, tokenizer=self.tokenizer)
        self._undo = watch_lookups(module, step, known)

    def _labels(self) -> int:
        return max((store.labels for store in self._stores.values()), default=0)

    def _end(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None

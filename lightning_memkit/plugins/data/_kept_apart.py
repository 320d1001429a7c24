"""Packed attention for models of transformers, where the first batch of a run shows that they need it."""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lightning_memkit.attention.adapters import outermost_models, use_packed_attention
from lightning_memkit.attention.contamination import ContaminationError
from lightning_memkit.data.batching.batch import PackedBatch
from lightning_memkit.plugins.callbacks.contamination import ContaminationProbe
from lightning_memkit.utilities.patching import Undo


class KeptApart(ContaminationProbe):
    """Probes the first packed batch, and gives models of transformers packed attention if documents see each other.

    A model that keeps them apart by itself stays as it is. The change is undone when the run ends.

    Raises:
        ContaminationError: documents see each other all the same, or the model's attention can't be replaced.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_said = False
        self._undo: Undo | None = None

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the models their own attention again."""
        self.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same, after an error."""
        self.end()

    def end(self) -> None:
        """Give the models their own attention again."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _probe(self, trainer: Trainer, pl_module: LightningModule, batch: PackedBatch, loader: int) -> None:
        try:
            super()._probe(trainer, pl_module, batch, loader)
            return
        except ContaminationError:
            self._undo = _switched(pl_module)
            if self._undo is None:
                raise
        try:
            super()._probe(trainer, pl_module, batch, loader)
        except BaseException:
            self.end()
            raise
        if not self._has_said:
            self._has_said = True
            theirs = sorted({type(one).__name__ for one in outermost_models(pl_module)})
            which = "fit" if trainer.state.fn == TrainerFn.FITTING else "evaluation"
            rank_zero_info(
                f"PackedDataModule: {', '.join(theirs)} uses packed_attention in this {which}, since documents of a "
                "row saw each other; use_packed_attention(model) keeps it so afterwards, too."
            )


def _switched(module: LightningModule) -> Undo | None:
    """Give models of transformers packed attention: the undo, or None if there are none that can take it."""
    try:
        return use_packed_attention(module) if outermost_models(module) else None
    except ValueError:  # an attention that can't be replaced, or that the user has replaced
        return None

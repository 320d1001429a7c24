"""The Lightning adapter of `probe_contamination`: once a run, at the first batch whose rows hold several documents."""

import warnings
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_memkit.attention.contamination import PROBED_ROWS, probe_contamination, probed_rows
from lightning_memkit.data.batching.batch import PackedBatch
from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching.ranks.agreement import any_rank
from lightning_memkit.plugins.seams.lightning_run import LightningRun
from lightning_memkit.plugins.seams.logged import loggers_silent, logging_of_run_held
from lightning_memkit.utilities.errors import NoEffectWarning

_STEPS: dict[Any, str] = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}
_TRIED_BATCHES = 64  # that hold no row of two documents; with packing="none" none ever does


class ContaminationProbe(Callback):
    """Stops a run at its first batch if packed documents see each other; costs four forwards of two rows.

    It runs the module's own step on the first packed batch (`training_step`; in `Trainer.validate`, `test` and
    `predict` theirs), changes the tokens of some documents, and checks that the results of the others stay the same.
    It is a trial: weights, random numbers, buffers, metrics and logs are as without it.

    Raises:
        ContaminationError: at the first batch; it names the module in which documents see each other, and the remedy.
    """

    watches_only = True
    probes_contamination = True

    def __init__(self) -> None:
        self._batches_left = _TRIED_BATCHES

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Probe each fit anew."""
        self._batches_left = _TRIED_BATCHES

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Probe each evaluation anew that is a run of its own; one within a fit is probed by its training."""
        if trainer.state.fn != TrainerFn.FITTING:
            self._batches_left = _TRIED_BATCHES

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Probe each test anew."""
        self._batches_left = _TRIED_BATCHES

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Probe each prediction anew."""
        self._batches_left = _TRIED_BATCHES

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Probe batches until one gives an answer, in a run of its own."""
        if trainer.state.fn != TrainerFn.FITTING:
            self._evaluates(trainer, pl_module, batch, dataloader_idx)

    def on_test_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Probe batches until one gives an answer."""
        self._evaluates(trainer, pl_module, batch, dataloader_idx)

    def on_predict_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Probe batches until one gives an answer."""
        self._evaluates(trainer, pl_module, batch, dataloader_idx)

    def _evaluates(self, trainer: Trainer, pl_module: LightningModule, batch: Any, loader: int) -> None:
        # Other loaders of an evaluation may have other batches.
        if self._batches_left and isinstance(batch, PackedBatch):
            self._try(trainer, pl_module, batch, loader)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Probe batches until one gives an answer."""
        if self._batches_left == 0:
            return
        reason = _why_not(pl_module, batch)
        if reason is not None:
            self._batches_left = 0
            warnings.warn(
                f"ContaminationProbe has no effect: {reason}. Call "
                "lightning_memkit.attention.contamination.probe_contamination by yourself.",
                NoEffectWarning,
                stacklevel=2,
            )
        else:
            self._try(trainer, pl_module, batch, 0)

    def _try(self, trainer: Trainer, pl_module: LightningModule, batch: PackedBatch, loader: int) -> None:
        """Probe a batch if it has a row of two documents, on any rank."""
        if any_rank(LightningRun(trainer), probed_rows(batch) is not None):
            self._batches_left = 0
            self._probe(trainer, pl_module, batch, loader)
            return
        self._batches_left -= 1
        if self._batches_left == 0:
            warnings.warn(
                f"ContaminationProbe has no effect: no row of the first {_TRIED_BATCHES} batches holds two documents.",
                NoEffectWarning,
                stacklevel=3,
            )

    def _probe(self, trainer: Trainer, pl_module: LightningModule, batch: PackedBatch, loader: int) -> None:
        for rows in range(PROBED_ROWS, 0, -1):
            part = probed_rows(batch, rows) or batch.split([batch.rows])[0]
            try:
                _probe_rows(trainer, pl_module, part, loader)
                return
            except Exception as error:
                # With several ranks, don't retry: the others would wait in collectives for this rank's
                # forward. What fails here would fail in training, too.
                if trainer.world_size > 1 or not is_out_of_memory(error):
                    raise
        warnings.warn(
            "ContaminationProbe has no effect: not even the forward of one row fits into memory.",
            NoEffectWarning,
            stacklevel=3,
        )


def _why_not(pl_module: LightningModule, batch: Any) -> str | None:
    if not isinstance(batch, PackedBatch):
        return f"the batches are no PackedBatch but {type(batch).__name__}, which does not tell where documents end"
    if not pl_module.automatic_optimization:
        return "with manual optimization training_step steps the optimizer, which a probe must not"
    return None


def _probe_rows(trainer: Trainer, pl_module: LightningModule, part: PackedBatch, loader: int) -> None:
    strategy, evaluates = trainer.strategy, trainer.state.fn != TrainerFn.FITTING
    name = _STEPS[trainer.state.fn]
    # As Lightning does: the number of the loader only where there are several.
    takes_number = is_param_in_hook_signature(getattr(pl_module, name), "batch_idx", min_args=2)
    arguments = [*([0] if takes_number else []), *([loader] if _has_loaders(trainer) else [])]
    if "batch_to_device" in vars(strategy):  # MemoryBudget leaves batches on the host
        part = type(strategy).batch_to_device(strategy, part, dataloader_idx=0)
    run = getattr(strategy, name)
    with logging_of_run_held(trainer), loggers_silent(trainer):
        probe_contamination(
            pl_module,
            part,
            lambda given: run(given, *arguments),
            agree=partial(any_rank, LightningRun(trainer)),
            evaluates=evaluates,
        )


def _has_loaders(trainer: Trainer) -> bool:
    """Whether an evaluation has several loaders."""
    batches: dict[Any, Any] = {
        TrainerFn.VALIDATING: trainer.num_val_batches,
        TrainerFn.TESTING: trainer.num_test_batches,
        TrainerFn.PREDICTING: trainer.num_predict_batches,
    }
    return len(batches.get(trainer.state.fn, ())) > 1

"""Predict configurations: a family's choices become the Trainer's arguments."""

import warnings
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

import lightning_memkit
from lightning_memkit.activations.checkpointing import checkpoint_modules
from lightning_memkit.loss.switch import use_chunked_loss
from lightning_memkit.micro_batching import split_batch
from lightning_memkit.planning.choices import Family, PluginSpec, listed
from lightning_memkit.planning.problem import ChunkLimits, UnavailableError
from lightning_memkit.plugins.asked import plan_columns, splits_batches
from lightning_memkit.plugins.planning._planned_chunks import PlannedChunks
from lightning_memkit.plugins.planning._planned_optimizer import EightBitStates
from lightning_memkit.plugins.planning.prediction import predict_memory
from lightning_memkit.prediction.result import Prediction
from lightning_memkit.utilities.errors import NoEffectWarning


class BatchParts:
    """A batch and its micro-batches: alone on a GPU, but on the CPU in memory beside the whole batch."""

    def __init__(self, batch: Any, rows: int, *, on_cpu: bool) -> None:
        self.batch, self.rows, self._on_cpu = batch, rows, on_cpu

    def first(self, size: int) -> Any:
        """The first micro-batch of `size` rows."""
        if size >= self.rows:
            return self.batch
        part = split_batch(self.batch, [size, self.rows - size])[0]
        return part if self._on_cpu else apply_to_collection(part, Tensor, Tensor.clone)


class Predictions:
    """Predicts each family at each micro-batch size, and limits of chunks, once.

    Args:
        module: as `plan` takes it.
        parts: gives the micro-batches.
        given: the Trainer's arguments that are kept.
        device: as `predict_memory` takes it.
    """

    def __init__(self, module: Any, parts: BatchParts, given: Mapping[str, Any], device: Any) -> None:
        self._module, self._parts, self._device = module, parts, device
        self._given = dict(given)
        self._given["callbacks"] = [one for one in listed(given.get("callbacks")) if not splits_batches(one)]
        self._known: dict[tuple[Family, int, ChunkLimits], Prediction] = {}

    def __call__(self, family: Family, size: int, chunks: ChunkLimits = ChunkLimits()) -> Prediction:  # noqa: B008
        """The prediction.

        Raises:
            UnavailableError: a choice does not apply to the module.
        """
        key = (family, size, chunks)
        if key not in self._known:
            self._known[key] = self._predicted(*key)
        return self._known[key]

    def ask(self, callback: Callback, rows: int) -> None:
        """Run the beginning of a fit with a callback, under the given arguments."""
        options = {**self._given, "callbacks": [callback, *self._given["callbacks"]]}
        predict_memory(self._module, self._parts.first(rows), trainer=options, device=self._device)

    def _predicted(self, family: Family, size: int, chunks: ChunkLimits) -> Prediction:
        options, callbacks = dict(self._given), list(self._given["callbacks"])
        for choice in family.choices:
            options.update(choice.arguments)
        plugins = [_built(part) for choice in family.choices for part in choice.plugins]
        if plugins:
            options["plugins"] = [*listed(self._given.get("plugins")), *plugins]
        added = [_built(part) for choice in family.choices for part in choice.callbacks]
        own: list[Callback] = [EightBitStates()] if family.optimizer is not None else []
        chunked = [] if chunks == ChunkLimits() else [PlannedChunks(chunks)]
        options["callbacks"] = [*own, _ChoiceNeeds(added), *callbacks, *added, *chunked]
        if size < self._parts.rows:  # two are enough: from the second on gradients exist
            options["accumulate_grad_batches"] = max(2, int(options.get("accumulate_grad_batches") or 1))
        return predict_memory(self._module, self._parts.first(size), trainer=options, device=self._device)


class _ChoiceNeeds(Callback):
    """Refuses choices that don't apply to the module, before the callbacks themselves warn or fail."""

    def __init__(self, callbacks: list[Callback]) -> None:
        columns = plan_columns(callbacks)
        self._needs_blocks, self._needs_heads = "checkpointing" in columns, "loss" in columns
        self._releases = "gradients" in columns

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not is_overridden("configure_model", pl_module):
            self._check(pl_module)
        if self._releases:
            self._check_release(lambda release: release.setup(trainer, pl_module, stage))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if is_overridden("configure_model", pl_module):
            self._check(pl_module)
        if self._releases:
            self._check_release(lambda release: release.on_fit_start(trainer, pl_module))

    def _check(self, module: LightningModule) -> None:
        if self._needs_heads:
            try:
                use_chunked_loss(module)()
            except ValueError as error:
                raise UnavailableError("loss", str(error)) from error
        if self._needs_blocks:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error", NoEffectWarning)
                    checkpoint_modules(module)()
            except (ValueError, NoEffectWarning) as error:
                raise UnavailableError("checkpointing", str(error)) from error

    def _check_release(self, begin: Any) -> None:
        release = lightning_memkit.GradientRelease()
        try:
            begin(release)
        except (ValueError, TypeError) as error:
            raise UnavailableError("gradients", str(error)) from error
        finally:
            release._stop()


def _built(part: PluginSpec) -> Any:
    return getattr(lightning_memkit, part.name)(**part.options)

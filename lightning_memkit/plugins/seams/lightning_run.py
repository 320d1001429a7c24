"""The engine's `Run`, implemented for Lightning's training loop."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_debug, rank_zero_warn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memkit.activations.planned import BudgetPlan
from lightning_memkit.distributed.ddp import why_no_late_reduction
from lightning_memkit.micro_batching.run import Logged, Run
from lightning_memkit.micro_batching.sizes.tuned_sizes import class_name, without_addresses
from lightning_memkit.plugins.asked import callbacks_of, says
from lightning_memkit.plugins.seams import _checks, bars, loaders, logged, strategy
from lightning_memkit.plugins.seams._worst_batch import scanned_once, worst_batch
from lightning_memkit.utilities.patching import Undo

T = TypeVar("T")

_OURS = "lightning_memkit."
_NOT_THE_USERS = (_OURS, "lightning.", "pytorch_lightning.")
_HOOKS_IN_A_STEP = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)


class LightningRun(Run):
    """Answers the engine's questions about a training loop from a Trainer; members are documented at `Run`.

    Args:
        trainer: the trainer.
        transfer: moves a micro-batch to the device, with the user's transfer hooks.
    """

    def __init__(
        self, trainer: Trainer, transfer: Callable[[Any], Any] = lambda micro_batch: micro_batch
    ) -> None:
        self.trainer, self._transfer = trainer, transfer

    @property
    def _callbacks(self) -> list[Any]:
        return callbacks_of(self.trainer)

    @property
    @override
    def module(self) -> nn.Module:
        return self.trainer.lightning_module

    @property
    @override
    def wrapped(self) -> nn.Module | None:
        return self.trainer.strategy.model

    @property
    @override
    def ranks_by(self) -> str:
        return type(self.trainer.strategy).__name__

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        return self.trainer.optimizers

    @property
    @override
    def device(self) -> torch.device:
        return self.trainer.strategy.root_device

    @property
    @override
    def precision(self) -> str:
        return str(self.trainer.precision_plugin.precision)

    @property
    @override
    def world_size(self) -> int:
        return self.trainer.world_size

    @property
    @override
    def steps_taken(self) -> int:
        return self.trainer.global_step

    @property
    @override
    def batches_a_step(self) -> int:
        return self.trainer.accumulate_grad_batches

    @batches_a_step.setter
    def batches_a_step(self, batches: int) -> None:
        self.trainer.accumulate_grad_batches = batches

    @property
    @override
    def meets_in_every_micro_batch(self) -> bool:
        return strategy.communicates_in_every_part(self.trainer)

    @property
    @override
    def sums_gradients_otherwise(self) -> bool:
        return hasattr(self.trainer.precision_plugin, "set_gradient_parts")

    @property
    @override
    def recomputes_activations(self) -> bool:
        return any(says(one, "recomputes_activations") for one in self._callbacks)

    @property
    @override
    def offloads_states(self) -> bool:
        return any(says(one, "offloads_states") for one in self._callbacks)

    @property
    @override
    def recomputation(self) -> BudgetPlan | None:
        plans = (getattr(callback, "chosen_for_step", None) for callback in self._callbacks)
        return next((plan for plan in plans if plan is not None), None)

    @property
    @override
    def loader_batch_size(self) -> int | None:
        size = getattr(loaders.training_source(self.trainer), "batch_size", None)
        return size if isinstance(size, int) else None

    @override
    def transfer(self, micro_batch: Any) -> Any:
        return self._transfer(micro_batch)

    @override
    def worst_batch(self, batch: Any, rows: int) -> Any:
        return worst_batch(self.trainer, batch, rows)

    @override
    def scanned_once(self) -> AbstractContextManager[None]:
        return scanned_once()

    @override
    def set_gradient_parts(self, parts: int) -> None:
        setter: Any = getattr(self.trainer.precision_plugin, "set_gradient_parts", None)
        if setter is not None:
            setter(parts * self.batches_a_step)

    @override
    def gradient_sync(self, *, wanted: bool) -> AbstractContextManager[None]:
        return strategy.no_gradient_sync(self.trainer, block=not wanted)

    @override
    def clip_by(self, clip: Callable[[Iterable[nn.Parameter], float], bool]) -> Undo:
        return strategy.clip_by(self.trainer, clip)

    @override
    def of_first_rank(self, answer: Callable[[], T]) -> T:
        return self.trainer.strategy.broadcast(answer() if self.is_first_rank else None)  # pyright: ignore[reportReturnType]

    @property
    @override
    def is_first_rank(self) -> bool:
        return self.trainer.is_global_zero

    @override
    def logging_held(self) -> AbstractContextManager[list[Logged]]:
        return logged.logging_held(self.trainer)

    @override
    def log_now(self, entry: Logged) -> None:
        logged.log_now(self.trainer, entry)

    @override
    def keep_results(self) -> Undo:
        return logged.keep_results(self.trainer)

    @override
    def loggers_silent(self) -> AbstractContextManager[None]:
        return logged.loggers_silent(self.trainer)

    @override
    def keep_scaler(self) -> Undo:
        return strategy.keep_scaler(self.trainer)

    @override
    def changed_beside(self) -> dict[str, Any]:
        found = super().changed_beside()
        for callback in self._callbacks:
            kind = type(callback)
            hears = any(getattr(kind, hook) is not getattr(Callback, hook) for hook in _HOOKS_IN_A_STEP)
            if hears and not kind.__module__.startswith(_NOT_THE_USERS):
                found[kind.__name__] = callback
        return found

    @override
    def hooks_by_micro_batch(self) -> list[str]:
        return _checks.hooks_run_by_micro_batch(self.trainer, self.trainer.lightning_module)

    @override
    def hooks_before_zero_grad(self) -> list[str]:
        return _checks.hooks_run_before_zero_grad(self.trainer, self.trainer.lightning_module)

    @override
    def zeroes_gradients(self, optimizer: Optimizer) -> bool:
        return _checks.zeroes_gradients(self.trainer.lightning_module, optimizer)

    @override
    def out_of_memory(self, error: BaseException) -> None:
        for callback in self._callbacks:
            seen = getattr(callback, "on_out_of_memory", None)
            if seen is not None:
                seen(self.trainer, error)

    @override
    def settings(self) -> dict[str, Any]:
        trainer, precision = self.trainer, self.trainer.precision_plugin
        ours = [callback for callback in self._callbacks if _is_ours(callback)]
        return {
            "precision": [class_name(precision), self.precision],
            "precision_options": _options(precision),
            "strategy": class_name(trainer.strategy),
            "clips": trainer.gradient_clip_val is not None,
            "callbacks": sorted(f"{class_name(callback)} {_options(callback)}" for callback in ours),
        }

    @override
    def info(self, text: str) -> None:
        bars.info(self.trainer, text)

    @override
    def debug(self, text: str) -> None:
        rank_zero_debug(text)

    @override
    def warn(self, text: str) -> None:
        rank_zero_warn(text)


class EvaluationRun(LightningRun):
    """A run whose logged values are those of the validation, test or prediction loop that is active."""

    @override
    @contextmanager
    def logging_held(self) -> Iterator[list[Logged]]:
        results = self.trainer._results
        if results is None:  # prediction logs nothing
            yield []
            return
        with logged.calls_held(results) as held:
            yield held

    @override
    def log_now(self, entry: Logged) -> None:
        results: Any = self.trainer._results
        results.log(**entry)

    @override
    def keep_results(self) -> Undo:
        results = self.trainer._results
        return logged.keep_logged(results) if results is not None else lambda: None

    @override
    @contextmanager
    def nothing_logged(self) -> Iterator[list[Logged]]:
        results: Any = self.trainer._results
        connector = self.trainer._logger_connector
        current = connector._current_fx
        if results is not None:
            vars(results)["reset"] = lambda *args, **kwargs: None
        try:
            with super().nothing_logged() as held:
                yield held
        finally:
            connector._current_fx = current
            if results is not None:
                vars(results).pop("reset", None)


def averages_after_backward(trainer: Trainer, model: DistributedDataParallel) -> bool:
    """Whether a callback (`MemoryBudget`) averages DDP's gradients itself, whatever their dtype."""
    wanted = any(says(callback, "averages_after_backward") for callback in callbacks_of(trainer))
    # A single rank leaves it to DDP.
    return trainer.world_size > 1 and wanted and not why_no_late_reduction(model)


def _is_ours(plugin: object) -> bool:
    return type(plugin).__module__.startswith(_OURS)


def _options(plugin: object) -> str:
    """The options of one of our plugins."""
    return without_addresses(repr(plugin)) if _is_ours(plugin) else ""

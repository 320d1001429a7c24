"""The one place that uses private names of Lightning's evaluation loops.

`tests/plugins/test_seam_evaluation.py` checks these names. Validation, test and prediction loops pass a batch
to the strategy twice: to move it to the device, and to run its step. `install` replaces both calls by ones
that call a driver.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from lightning_memkit.micro_batching.evaluation.step import EvaluationStep
from lightning_memkit.plugins.seams.training_loop import finder_runs
from lightning_memkit.utilities.patching import Undo

HOOKS = ("validation_step", "test_step", "predict_step")


class LightningEvaluationStep:
    """One batch of a loop of Lightning's; members are documented at `EvaluationStep`.

    Args:
        trainer: the trainer whose loop it is.
        hook: one of `HOOKS`.
        batch: the batch as it comes from the loader, on the host.
        dataloader_idx: the index of its loader.
        stock: the strategy's own step.
        transfer: moves a micro-batch to the device, with the user's transfer hooks.
    """

    def __init__(
        self,
        trainer: Trainer,
        hook: str,
        batch: Any,
        dataloader_idx: int,
        stock: Callable[..., Any],
        transfer: Callable[[Any], Any],
    ) -> None:
        self.trainer = trainer
        self.hook = hook
        self.batch = batch
        self.given = batch  # what the loop gets: the batch on the host, or on the device
        self.dataloader_idx = dataloader_idx
        self.transfer = transfer
        self._stock = stock
        loop: Any = trainer._active_loop
        self.starts_run = loop.batch_progress.current.ready == 0
        several = getattr(loop, "_is_sequential", True) and loop.num_dataloaders > 1
        kwargs = loop._build_kwargs(batch, 0, dataloader_idx if several else None)
        self._rest: tuple[Any, ...] = loop._build_step_args_from_hook_kwargs(kwargs, hook)[1:]

    def called_with(self, rest: tuple[Any, ...]) -> None:
        """Store the batch's index and the other arguments that the loop passes after the batch."""
        self._rest = rest

    @property
    def outputs_kept(self) -> float:
        """How many batches' outputs Lightning keeps of this loader; 0 if none, or if it has begun to."""
        writers = [one for one in vars(self.trainer)["callbacks"] if isinstance(one, BasePredictionWriter)]
        loop = self.trainer.predict_loop
        if not loop.return_predictions and not any(writer.interval.on_epoch for writer in writers):
            return 0
        begun = loop._predictions[self.dataloader_idx]
        return 0 if begun else loop.max_batches[self.dataloader_idx]

    def whole(self) -> Any:
        """The unsplit batch on the device."""
        return self.transfer(self.batch) if self.given is self.batch else self.given

    def forward(self, part: Any) -> Any:
        """The user's step on a micro-batch that is on the device."""
        module = self.trainer.lightning_module
        before, module._current_fx_name = module._current_fx_name, self.hook
        try:
            return self._stock(part, *self._rest)
        finally:
            module._current_fx_name = before


class EvaluationDriver(Protocol):
    """Decides how a batch is run."""

    def stays_on_host(self, step: EvaluationStep) -> bool:
        """Whether the batch, just read from the loader, stays on the host; may run trials."""
        ...

    def run(self, step: EvaluationStep) -> Any:
        """Run the batch and return its output; its logged values count."""
        ...


def install(trainer: Trainer, driver: EvaluationDriver) -> Undo:
    """Have a driver run every batch of validation, test and prediction; returns the undo."""
    strategy = trainer.strategy
    transfer, stands_aside = strategy.batch_to_device, finder_runs(trainer)
    stock = {hook: getattr(strategy, hook) for hook in HOOKS}
    before = {name: vars(strategy)[name] for name in ("batch_to_device", *HOOKS) if name in vars(strategy)}
    arrived: list[LightningEvaluationStep] = []

    def batch_to_device(batch: Any, *args: Any, **kwargs: Any) -> Any:
        hook, module = _evaluating(trainer), trainer.lightning_module
        # Callbacks may move batches of their own; only handle calls by the loop itself.
        if hook is None or stands_aside() or module._current_fx_name != "batch_to_device":
            return transfer(batch, *args, **kwargs)
        index = kwargs.get("dataloader_idx", 0)
        move = partial(transfer, **{**kwargs, "dataloader_idx": index})
        step = LightningEvaluationStep(trainer, hook, batch, index, stock[hook], move)
        step.given = batch if driver.stays_on_host(step) else move(batch)
        arrived[:] = [step]
        return step.given

    def run(hook: str, *args: Any, **kwargs: Any) -> Any:
        step = arrived.pop() if arrived else None
        # `validation_step(dataloader_iter)` fetches its batches itself: there is nothing to split.
        if step is None or step.hook != hook or not args or args[0] is not step.given:
            return stock[hook](*args, **kwargs)
        step.called_with(args[1:])
        return driver.run(step)

    strategy.batch_to_device = batch_to_device
    for hook in HOOKS:
        setattr(strategy, hook, partial(run, hook))

    def undo() -> None:
        for name in ("batch_to_device", *HOOKS):
            vars(strategy).pop(name, None)
        vars(strategy).update(before)

    return undo


def _evaluating(trainer: Trainer) -> str | None:
    """The step hook of the current evaluation loop; None while training."""
    if trainer.validating or trainer.sanity_checking:
        return "validation_step"
    if trainer.testing:
        return "test_step"
    return "predict_step" if trainer.predicting else None

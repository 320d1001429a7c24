"""A step of Lightning's training loop and its closure; `tests/plugins/test_seam.py` checks private names.

Lightning runs zero_grad after `training_step` inside its closure, so a batch can be split only where the
closure is made. `install` replaces the loop's automatic optimization by one whose closure calls a driver.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.trainer import call
from torch import Tensor
from torch.optim import Optimizer

from lightning_memkit.micro_batching.run import Run, Step
from lightning_memkit.utilities.patching import Undo


class LightningStep(Step):
    """One batch of Lightning's loop, as operations that may run several times."""

    def __init__(
        self, loop: "PartsOptimization", kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int
    ) -> None:
        self.run = loop.engine_run
        self._loop = loop
        self._kwargs = kwargs
        self._backward = loop._make_backward_fn(optimizer)
        self._zero_grad = loop._make_zero_grad_fn(batch_idx, optimizer)
        self.batch: Any = kwargs["batch"]
        self.batch_idx = batch_idx
        self.optimizer = optimizer
        self.ends_window = not loop.trainer.fit_loop._should_accumulate()

    @property
    def trainer(self) -> Trainer:
        """The trainer whose step this is."""
        return self._loop.trainer

    @property
    def starts_window(self) -> bool:
        """Whether gradients are zeroed in this step."""
        return self._zero_grad is not None

    def forward(self, micro_batch: Any) -> tuple[Tensor | None, dict[str, Any]]:
        """Run `training_step` on a micro-batch; returns its loss, and what else it returned."""
        kwargs = OrderedDict(self._kwargs, batch=micro_batch)
        trainer = self._loop.trainer
        output = call._call_strategy_hook(trainer, "training_step", *kwargs.values())
        trainer.strategy.post_training_step()
        result = ClosureResult.from_training_step_output(output)
        if result.closure_loss is None:
            return None, result.extra
        # Not closure_loss: Lightning divides it, which would add a division to the graph that the probe
        # reads.
        return output if isinstance(output, Tensor) else output["loss"], result.extra

    def zero_grad(self) -> None:
        """Run Lightning's zero_grad with its hooks, if this batch starts an accumulation window."""
        if self._zero_grad is not None:
            self._zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Run Lightning's backward with its hooks, except those left to `after_backward`."""
        if self._backward is not None:
            with _after_backward_held():
                self._backward(loss)

    def after_backward(self) -> None:
        """Run the hooks that read a batch's gradients, once these are complete."""
        if self._backward is None:
            return
        trainer = self.trainer
        with _callbacks_of(trainer, by_part=False):
            call._call_callback_hooks(trainer, "on_after_backward")
        call._call_lightning_module_hook(trainer, "on_after_backward")

    def quiet_backward(self, loss: Tensor) -> None:
        """Run the module's own backward for trials, without callback hooks and scaling."""
        self._loop.trainer.lightning_module.backward(loss)

    def keep_counters(self) -> Undo:
        """Return a function that restores the loop's progress counters."""
        progress = self._loop.optim_progress
        before = progress.state_dict()
        return lambda: progress.load_state_dict(before)


@contextmanager
def _callbacks_of(trainer: Trainer, *, by_part: bool) -> Iterator[None]:
    """Restrict the trainer to callbacks with `sees_micro_batches`, or to those without it."""
    attributes = vars(trainer)
    callbacks: list[Any] = attributes["callbacks"]
    attributes["callbacks"] = [c for c in callbacks if getattr(c, "sees_micro_batches", False) is by_part]
    try:
        yield
    finally:
        attributes["callbacks"] = callbacks


@contextmanager
def _after_backward_held() -> Iterator[None]:
    """Let Lightning's backward call `on_after_backward` only on callbacks with `sees_micro_batches`.

    For all others it is too early: the batch's gradients are not complete yet.
    """
    of_callbacks, of_module = call._call_callback_hooks, call._call_lightning_module_hook

    def call_callbacks(trainer: Trainer, hook_name: str, *args: Any, **kwargs: Any) -> None:
        if hook_name == "on_after_backward":
            with _callbacks_of(trainer, by_part=True):
                of_callbacks(trainer, hook_name, *args, **kwargs)
        else:
            of_callbacks(trainer, hook_name, *args, **kwargs)

    def call_module(trainer: Trainer, hook_name: str, *args: Any, **kwargs: Any) -> Any:
        if hook_name == "on_after_backward":
            return None
        return of_module(trainer, hook_name, *args, **kwargs)

    call._call_callback_hooks, call._call_lightning_module_hook = call_callbacks, call_module
    try:
        yield
    finally:
        call._call_callback_hooks, call._call_lightning_module_hook = of_callbacks, of_module


class Driver(Protocol):
    """Decides how a batch is run."""

    def prepare(self, step: Step) -> None:
        """Called before every batch's closure exists; may run trials."""
        ...

    def around(self, step: Step) -> AbstractContextManager[object]:
        """A context that encloses the closure and the optimizer's step."""
        ...

    def drive(self, step: Step, optimize: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Call `optimize` (the closure, hooks, clipping and the optimizer's step); retry it if needed."""
        ...

    def run(self, step: Step) -> tuple[Tensor | None, dict[str, Any]]:
        """Forward, zero_grad and backward of a whole batch; returns its loss and what else was returned."""
        ...


class _PartsClosure(Closure):
    """Lightning's closure with the driver's `run` instead of one step, zero_grad and backward."""

    def __init__(self, run: Callable[[], tuple[Tensor | None, dict[str, Any]]], normalize: int) -> None:
        super().__init__(step_fn=lambda: ClosureResult(None))
        self._run = run
        self._normalize = normalize

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        loss, extra = self._run()
        if loss is None:
            self.warning_cache.warn(
                "`training_step` returned `None`. If this was on purpose, ignore this warning..."
            )
            return ClosureResult(None, extra=extra)
        return ClosureResult(loss / self._normalize, extra=extra)


class PartsOptimization(_AutomaticOptimization):
    """Automatic optimization whose closure calls a driver; its state_dict keys are Lightning's."""

    def __init__(self, trainer: Trainer, run: Run, driver: Driver) -> None:
        super().__init__(trainer)
        self.engine_run = run
        self._driver = driver
        self._stands_aside = finder_runs(trainer)
        self._step: Step | None = None

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]) -> dict[str, Any]:
        """Let the driver prepare, then step as Lightning does."""
        # `training_step(dataloader_iter)` fetches its batches itself: there is nothing to split.
        if "batch" not in kwargs or self._stands_aside():
            return super().run(optimizer, batch_idx, kwargs)
        self._driver.prepare(LightningStep(self, kwargs, optimizer, batch_idx))
        # A new object: preparing may have changed how many batches make a step.
        self._step = step = LightningStep(self, kwargs, optimizer, batch_idx)
        optimize = partial(super().run, optimizer, batch_idx, kwargs)
        try:
            with self._driver.around(step):
                return self._driver.drive(step, optimize)
        finally:
            self._step = None

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        if self._step is None:  # `training_step(dataloader_iter)`
            return super()._make_closure(kwargs, optimizer, batch_idx)
        return _PartsClosure(partial(self._driver.run, self._step), self.trainer.accumulate_grad_batches)


def finder_runs(trainer: Trainer) -> Callable[[], bool]:
    """Return a function that tells whether Lightning's batch size finder is currently trying sizes.

    The finder asks which batches fit whole, and removes all callbacks meanwhile. (The learning rate finder
    replaces them by its own: its steps are training steps.)
    """
    had_callbacks = bool(vars(trainer)["callbacks"])
    return lambda: had_callbacks and not vars(trainer)["callbacks"]


def install(trainer: Trainer, run: Run, driver: Driver) -> Undo:
    """Have a driver run every batch of automatic optimization, as steps of `run`; returns the undo."""
    loop = trainer.fit_loop.epoch_loop
    stock = loop.automatic_optimization
    replacement = PartsOptimization(trainer, run, driver)
    replacement.optim_progress = stock.optim_progress
    replacement._skip_backward = stock._skip_backward
    loop.automatic_optimization = replacement

    def undo() -> None:
        loop.automatic_optimization = stock

    return undo


def epoch_of(trainer: Trainer) -> int:
    """How many epochs of a fit are over, including those of the run that is resumed."""
    current: Any = trainer.fit_loop.epoch_progress.current
    return current.processed

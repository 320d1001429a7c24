"""Trial steps that leave no trace: the gradient of a batch, and the peak of a micro-batch."""

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memkit import decomposability
from lightning_memkit.memory.measure import PeakMeter, peak_meter
from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching import (
    batch_size,
    split_batch,
)
from lightning_memkit.optim.compensation import compensation_of
from lightning_memkit.optim.journal import journal_of
from lightning_memkit.optim.snapshots import (
    forget_new_states,
    known_states,
    restore_snapshot,
    take_snapshot,
)
from lightning_memkit.plugins import _seam
from lightning_memkit.plugins._ranks import Ranks, local_optimizer
from lightning_memkit.plugins._tensors import tensors_of
from lightning_memkit.rollback import Generators, Rollback


class StepFailedError(Exception):
    """The user's step raised on a batch that it was given for a trial."""

    def __init__(self, cause: Exception, *, skipped: bool) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.skipped = skipped  # it returned None, as it may to skip a batch


class Trials:
    """Runs trial steps of a module; weights, optimizer, RNG, buffers, metrics and logs end as they began.

    Args:
        trainer: the trainer, within its training loop.
        transfer: moves a part to the device.
        budget_bytes: what a probe's tensors may take on the host; an accelerator's allocator keeps its own cap.
    """

    def __init__(
        self, trainer: Trainer, transfer: Callable[[Any], Any], budget_bytes: int | None = None
    ) -> None:
        self.changing: frozenset[tuple[str, str]] = frozenset()
        self.logged: list[dict[str, Any]] = []
        self.handed_on: list[str] = []
        self.limited = False
        self.ranks = Ranks()
        self._trainer = trainer
        self._transfer = transfer
        self._budget_bytes = budget_bytes

    @property
    def _module(self) -> LightningModule:
        return self._trainer.lightning_module

    @contextmanager
    def _no_trace(self, step: _seam.Step) -> Iterator[list[dict[str, Any]]]:
        rollback = self._rollback = Rollback(self._module)
        # The last step's gradients are zeroed before they are used: held beside the trial's they would cost twice.
        kept = [] if step.starts_window else [(p, p.grad) for p in self._module.parameters()]
        for parameter in self._module.parameters():
            parameter.grad = None
        try:
            with (
                _seam.logging_held(self._trainer) as logged,
                _seam.loggers_silent(self._trainer),
                torch.enable_grad(),
            ):
                yield logged
        finally:
            self.changing |= rollback.changed()
            rollback.restore()
            for parameter in self._module.parameters():
                parameter.grad = None
            for parameter, gradient in kept:
                parameter.grad = gradient

    def gradient_of(
        self, step: _seam.Step, batch: Any, *, seed: int | None = None, after: Any = None
    ) -> Tensor:
        """A sample of the gradient that a batch's own loss has; `seed` draws other random numbers than training.

        `logged` then holds what the step logged. With `after`, another batch's step comes first, with the same random
        numbers, and leaves behind what it leaves behind; `handed_on` names the attributes that it has set.
        """
        with self._no_trace(step) as self.logged:
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)
                torch.manual_seed(seed)
            skipped = False
            if after is not None:
                self._run_before(step, after)
            try:
                skipped = not self._run(step, batch, self._limit(step))
                if skipped:
                    raise ValueError("training_step returned None")
            except Exception as error:
                raise StepFailedError(error, skipped=skipped) from error
            return decomposability.sampled_gradient(self._module.parameters())

    def _run_before(self, step: _seam.Step, batch: Any) -> None:
        generators = Generators()
        self._run(step, batch, self._limit(step))
        generators.restore()
        self.handed_on = self._rollback.replaced()
        for parameter in self._module.parameters():
            parameter.grad = None

    def _limit(self, step: _seam.Step) -> PeakMeter | None:
        """What refuses a probe that needs more than training may, where no allocator does."""
        device = self._trainer.strategy.root_device
        if self._budget_bytes is None or device.type != "cpu" or not self.limited:
            return None
        held = [*self._module.parameters(), *self._module.buffers(), *tensors_of(step.batch)]
        held += states_on(device, local_optimizer(step.optimizer))
        return peak_meter(device, held, self._budget_bytes)

    def _run(self, step: _seam.Step, batch: Any, meter: PeakMeter | None = None) -> bool:
        """Forward and backward of a part; whether it has a loss."""

        def run(part: Any) -> bool:
            loss, _ = step.forward(self._transfer(part))
            if loss is not None:
                step.quiet_backward(loss)
            return loss is not None

        def measured() -> bool:
            if meter is None:
                return run(batch)
            with meter:
                return run(batch)

        def smallest() -> None:
            rows = batch_size(batch)
            run(split_batch(batch, [1, rows - 1])[0] if rows > 1 else batch)

        return self.ranks.part(measured, smallest=smallest)

    @contextmanager
    def optimizer_state(self, step: _seam.Step) -> Iterator[tuple[list[Tensor], int]]:
        """Within it the optimizer's state exists as after a step, taken without gradient; then all is put back.

        Weights, states, group scalars and compensation are bitwise as before; their copies lie on the host
        meanwhile. Yields the state's tensors and the peak of the step.
        """
        optimizer = local_optimizer(step.optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        gradients = [(p, p.grad) for p in parameters]
        known = known_states(optimizer)
        try:
            peak = self._stepped_and_back(step, parameters)
            yield states_on(self._trainer.strategy.root_device, optimizer), peak
        finally:
            for p, gradient in gradients:
                p.grad = gradient
            forget_new_states(optimizer, known)

    def _stepped_and_back(self, step: _seam.Step, parameters: list[nn.Parameter]) -> int:
        """The peak of a step; what it has changed is as before, what it has made stays.

        Its copies are gone before parts are tried: on a CPU the host is the device.
        """
        optimizer = local_optimizer(step.optimizer)
        owner: Any = compensation_of(optimizer)
        host = torch.device("cpu")
        snapshot = owner.snapshot(device=host) if owner else take_snapshot(optimizer, device=host)
        try:
            return self._step_without_gradient(step, parameters)
        finally:
            if owner:
                owner.restore(snapshot, keep_new=True)
            else:
                restore_snapshot(optimizer, snapshot, keep_new=True)

    def _step_without_gradient(self, step: _seam.Step, parameters: list[nn.Parameter]) -> int:
        self._allocate_gradients(parameters)
        held = [*self._module.parameters(), *self._module.buffers(), *tensors_of(step.batch)]
        held += [p.grad for p in parameters if p.grad is not None]
        device = self._trainer.strategy.root_device
        # ZeRO's own step would send what is put back here to ranks that have no copy of it.
        optimizer = local_optimizer(step.optimizer)
        held += states_on(device, optimizer)
        meter = peak_meter(device, held)
        try:
            with meter, _without_hooks(optimizer):
                journal = journal_of(optimizer)
                # A device that is too full for copies leaves them to the host: they need not fit.
                counts_copies = device.type == "cpu" or journal is None
                with nullcontext() if counts_copies or journal is None else journal.paused():
                    optimizer.step()
                if journal is not None:
                    with journal.measuring():
                        optimizer.step()
                    if journal.needed and counts_copies:  # those of states, which a first step does not have
                        optimizer.step()
        except (RuntimeError, TypeError) as error:  # sparse gradients only, or a closure is asked for
            if is_out_of_memory(error):
                raise
            warnings.warn(
                f"MemoryBudget could not try a step of {type(optimizer).__name__} ({error}); its state is "
                "not in the verified peak.",
                stacklevel=2,
            )
        return meter.peak_bytes

    def _allocate_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        for p in parameters:
            if p.requires_grad:
                p.grad = torch.zeros_like(p, dtype=getattr(p, "grad_dtype", None) or p.dtype)

    def peak_of(
        self, step: _seam.Step, batch: Any, resident: list[Tensor], budget_bytes: int | None
    ) -> int | None:
        """The peak of forward and backward of one part, weights, gradients and `resident` included; None: OOM."""
        failed = False
        with self._no_trace(step):
            self._allocate_gradients(self._module.parameters())  # in a step's later parts all are alive
            held = [*self._module.parameters(), *self._module.buffers(), *resident]
            held += [p.grad for p in self._module.parameters() if p.grad is not None]
            meter = peak_meter(self._trainer.strategy.root_device, held, budget_bytes)
            try:
                self._run(step, batch, meter)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failed = True
        return None if failed else meter.peak_bytes


def states_on(device: torch.device, optimizer: Optimizer) -> list[Tensor]:
    """The states of an optimizer that are in a device's memory; others may be kept in the host's."""
    return [state for state in tensors_of(dict(optimizer.state)) if state.device.type == device.type]


@contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """The user's step hooks (an EMA, say) are not to hear of a trial."""
    hooks: tuple[Any, ...] = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    kept = [dict(registered) for registered in hooks]
    for registered in hooks:
        registered.clear()
    try:
        yield
    finally:
        for registered, before in zip(hooks, kept, strict=True):
            registered.update(before)

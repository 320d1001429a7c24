"""Trial steps that leave no trace: the gradient of a batch, and the peak of a micro-batch."""

import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from lightning_memkit.memory.measure import AllocatorMeter, PeakMeter, peak_meter
from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching.changes.rollback import Rollback
from lightning_memkit.micro_batching.changes.state_walk import Keys
from lightning_memkit.micro_batching.changes.step_changes import StepChange, label
from lightning_memkit.micro_batching.graph.term_values import TermValues
from lightning_memkit.micro_batching.proof import decomposability
from lightning_memkit.micro_batching.proof.noted_changes import NotedChanges
from lightning_memkit.micro_batching.proof.optimizer_trial import allocate_gradients, states_on
from lightning_memkit.micro_batching.proof.some_rows import count_of_rows, one_row
from lightning_memkit.micro_batching.proof.trial_values import PassedOverError, StepFailedError, TrialValues
from lightning_memkit.micro_batching.ranks.agreement import (
    Ranks,
    local_optimizer,
)
from lightning_memkit.micro_batching.run import Run, Step
from lightning_memkit.micro_batching.shares.foreseen import ForeseenWronglyError
from lightning_memkit.optim.methods import uses_closure_its_own_way
from lightning_memkit.utilities.generators import Generators
from lightning_memkit.utilities.tensors import tensors_of


class Trials:
    """Runs trial steps of a module; weights, optimizer, RNG, buffers, metrics and logs end as they began.

    Args:
        run: the training loop.
        budget_bytes: what a probe's tensors may take on the host; an accelerator's allocator keeps its own cap.

    Attributes:
        changes: what the step of the latest `gradient_of` or `peak_of` changes besides gradients, each time that it
            runs: what a first step sets up once and a second one leaves alone (a mask that is built lazily) is not in.
        changing: the keys of all tensors that trials saw changed in place; a `Rollback` clones these.
        logged: what the step of the latest `gradient_of` logged.
        handed_on: the attributes that the batch before (`after=`) had set.
        returned: what the step of the latest run returned beside its loss.
        values: the numbers that the step of the latest `gradient_of` with `look=` has computed, by their nodes.
        between: called after the batch before (`after=`) has run.
        capture: called within `gradient_of` once the step has run; `captured` is what it gave.
    """

    def __init__(self, run: Run, budget_bytes: int | None = None) -> None:
        self.changing: frozenset[tuple[str, str]] = frozenset()
        self.changes: tuple[StepChange, ...] = ()
        self.logged: list[dict[str, Any]] = []
        self.handed_on: list[str] = []
        self.returned: dict[str, Any] = {}
        self.values: dict[tuple[Any, int], Tensor] = {}
        self.capture: Callable[[], Any] | None = None
        self.captured: Any = None
        self.between: Callable[[], None] | None = None
        self.limited = False
        self.ranks = Ranks()
        self._has_watched = False
        self._noted = NotedChanges(run, self)
        self._run = run
        self._budget_bytes = budget_bytes

    @property
    def _module(self) -> nn.Module:
        return self._run.module

    @contextmanager
    def no_trace(
        self, step: Step, *parts: Any, seen: bool = False, after_backward: bool = False
    ) -> Iterator[list[dict[str, Any]]]:
        """Within it a step leaves nothing behind; yields what it logs.

        Args:
            step: the step at hand.
            parts: what it will run on besides the step's batch.
            seen: also where compiled functions would hide writes, it is watched.
            after_backward: gradients that are there are the step's own, and stay.
        """
        unwatched = self._has_watched and self._sees_too_little() and not seen
        rollback = self._rollback = self.kept(step, *parts, changing=self.changing if unwatched else None)
        # The last step's gradients are zeroed before they are used: held beside the trial's they would cost twice.
        # A step that uses its closure in a way of its own may look at them before.
        zeroed = step.starts_window and not after_backward and not uses_closure_its_own_way(step.optimizer)
        kept = [] if zeroed else [(p, p.grad) for p in self._module.parameters()]
        for parameter in self._module.parameters():
            parameter.grad = None
        try:
            with (
                self._run.logging_held() as logged,
                self._run.loggers_silent(),
                torch.enable_grad(),
                nullcontext() if unwatched else rollback.watching(),
            ):
                yield logged
        finally:
            self.changing |= rollback.changed()
            lost = rollback.restore()
            for parameter in self._module.parameters():
                parameter.grad = None
            for parameter, gradient in kept:
                parameter.grad = gradient
        if lost:
            warnings.warn(
                f"A trial step changed {', '.join(sorted(label(*key) for key in lost))} by a kernel that PyTorch's "
                "dispatcher does not see: these keep what the trial left. Register the kernel as an operator that "
                "names what it writes to (torch.library.custom_op with mutates_args).",
                stacklevel=2,
            )

    def kept(self, step: Step, *parts: Any, changing: Keys | None = None) -> Rollback:
        """The state before a step that a trial puts back."""
        return Rollback(
            self._module, changing, batches=[step.batch, *parts], beside=step.run.changed_beside()
        )

    def gradient_of(
        self,
        step: Step,
        batch: Any,
        *,
        seed: int | None = None,
        after: Any = None,
        look: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """A sample of the gradient that a batch's own loss has; `seed` draws other random numbers than training.

        `logged` then holds what the step logged. With `after`, another batch's step comes first, with the same random
        numbers, and leaves behind what it leaves behind; `handed_on` names the attributes that it has set. `look` is
        given the loss, and what it returns is differentiated.
        """
        with self.no_trace(step, batch, after, seen=True) as self.logged:
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)
                torch.manual_seed(seed)
            skipped = False
            if after is not None:
                self._run_before(step, after)
            try:
                skipped = not self.run(step, batch, self._limit(step), look)
                if skipped:
                    raise ValueError("training_step returned None")
            except Exception as error:
                raise StepFailedError(error, skipped=skipped) from error
            gradient = decomposability.sampled_gradient(self._module.parameters())
            self.captured = None if self.capture is None else self.capture()
            returned, values = self.returned, self.values
            self._noted.note(step, batch, self._rollback, self.logged)
            self.returned, self.values = returned, values  # not what further steps gave
            return gradient

    def loss_of(self, step: Step, batch: Any) -> float | None:
        """The loss of a batch; None where the step fails on it or passes over it."""
        losses: list[float] = []

        def look(loss: Tensor) -> Tensor:
            losses.append(float(loss.detach()))
            return loss

        with self.no_trace(step, batch, seen=True):
            try:
                self.run(step, batch, self._limit(step), look)
            except Exception as error:  # of a row alone: what the step makes of several is asked elsewhere
                self._run.debug(f"MemoryBudget can't try a row by itself: {error!r}")
                return None
        return losses[0] if losses else None

    def values_of(self, step: Step, batch: Any, *, gradient: bool) -> TrialValues:
        """What a step logs and returns of some rows, by a forward after the batch's own backward; gradients stay.

        Args:
            step: whose rows they are.
            batch: the rows.
            gradient: whether the forward keeps what a backward needs.

        Raises:
            StepFailedError: the step fails on them, or passes them over.
        """
        with self.no_trace(step, batch, after_backward=True) as logged:
            generators = Generators()
            try:
                with torch.set_grad_enabled(gradient):
                    loss, returned = step.forward(self._run.transfer(batch))
            except Exception as error:
                raise StepFailedError(error, skipped=False) from error
            if loss is None:
                raise StepFailedError(ValueError("training_step returned None"), skipped=True)
            drew, elsewhere = generators.drawn_from()
            return TrialValues(logged=list(logged), returned=returned, drew=drew, drew_elsewhere=elsewhere)

    def _run_before(self, step: Step, batch: Any) -> None:
        generators = Generators()
        self.run(step, batch, self._limit(step))
        generators.restore()
        if self.between is not None:
            self.between()
        self.handed_on = self._rollback.replaced()
        for parameter in self._module.parameters():
            parameter.grad = None

    def _limit(self, step: Step) -> PeakMeter | None:
        """What refuses a probe that needs more than training may, where no allocator does."""
        return self.within_budget(step) if self.limited else None

    def within_budget(self, step: Step) -> PeakMeter | None:
        """What refuses more than the budget on a CPU; None elsewhere, or without one."""
        device = self._run.device
        if self._budget_bytes is None or device.type != "cpu":
            return None
        held = [*self._module.parameters(), *self._module.buffers(), *tensors_of(step.batch)]
        held += states_on(device, local_optimizer(step.optimizer))
        return peak_meter(device, held, self._budget_bytes)

    def run(
        self,
        step: Step,
        batch: Any,
        meter: PeakMeter | None = None,
        look: Callable[[Tensor], Tensor] | None = None,
    ) -> bool:
        """Forward and backward of a part; whether it has a loss."""

        def run(part: Any) -> bool:
            with TermValues() if look is not None else nullcontext() as noted:
                loss, self.returned = step.forward(self._run.transfer(part))
            self.values = {} if noted is None else noted.values
            if loss is None:
                if self.ranks.meets:  # in a backward, where the others wait
                    raise PassedOverError("training_step returned None")
                return False
            step.quiet_backward(loss if look is None else look(loss))
            return True

        def measured() -> bool:
            if meter is None:
                return run(batch)
            with meter:
                return run(batch)

        return self.ranks.part(measured, smallest=lambda: run(one_row(batch)))

    def peak_of(self, step: Step, batch: Any, resident: list[Tensor], budget_bytes: int | None) -> int | None:
        """The peak of forward and backward of one part, weights, gradients and `resident` included; None: OOM.

        Raises:
            StepFailedError: the step raised on fewer rows than the batch has (batch normalization of one row, say):
                it does not run at this size. On the whole batch the user's own error comes out as it is.
        """
        if self._sees_too_little():
            self._watch_first(step, batch)
        failed = False
        with self.no_trace(step, batch) as logged:
            allocate_gradients(self._module.parameters())  # in a step's later parts all are alive
            held = [*self._module.parameters(), *self._module.buffers(), *resident]
            held += [p.grad for p in self._module.parameters() if p.grad is not None]
            meter = peak_meter(self._run.device, held, budget_bytes)
            try:
                self.run(step, batch, meter)
            except ForeseenWronglyError:
                self._run.debug("MemoryBudget measures a batch that the module passes over.")
            except Exception as error:
                if not is_out_of_memory(error):
                    self._raise(step, batch, error)
                failed = True
            if not failed:
                self._has_watched = True
                self._noted.note(step, batch, self._rollback, logged)
        return None if failed else meter.peak_bytes

    def _raise(self, step: Step, batch: Any, error: Exception) -> NoReturn:
        """The user's own error, of the whole batch as it is."""
        if count_of_rows(batch) < count_of_rows(step.batch):
            raise StepFailedError(error, skipped=False) from error
        raise error

    def _sees_too_little(self) -> bool:
        """Whether a peak has to be measured with compiled functions, within which a trial does not see writes."""
        return "torch._dynamo" in sys.modules and AllocatorMeter.counts(self._run.device)

    def _watch_first(self, step: Step, batch: Any) -> None:
        """See what the step writes to before it is run unwatched.

        Probes don't count as seen: in eval mode, or with the batch's own statistics, a step writes to less. Nor does
        a run that was broken off.
        """
        if self._has_watched:
            return
        with self.no_trace(step, batch), suppress(RuntimeError, MemoryError):
            self.run(step, batch)
            self._has_watched = True

"""Trial steps that leave no trace, to get the gradient of a batch or the peak of a micro-batch."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_memkit.memory.measure import AllocatorMeter, PeakMeter, peak_meter
from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching.changes.kept_gradients import in_no_optimizer, outliving, set_aside
from lightning_memkit.micro_batching.changes.rollback import Rollback
from lightning_memkit.micro_batching.changes.spare_copies import SpareCopies
from lightning_memkit.micro_batching.changes.step_changes import StepChange
from lightning_memkit.micro_batching.changes.step_watch import StepWatch
from lightning_memkit.micro_batching.changes.value_walk import Keys
from lightning_memkit.micro_batching.graph.term_values import TermValues
from lightning_memkit.micro_batching.parts.complete_gradients import CompleteGradients
from lightning_memkit.micro_batching.parts.equal_draws import EqualDraws
from lightning_memkit.micro_batching.proof import decomposability
from lightning_memkit.micro_batching.proof.lost_state import warn_of_lost
from lightning_memkit.micro_batching.proof.noted_changes import NotedChanges
from lightning_memkit.micro_batching.proof.optimizer_trial import allocate_gradients, host_meter
from lightning_memkit.micro_batching.proof.read_gradients import ReadGradients
from lightning_memkit.micro_batching.proof.some_rows import count_of_rows, one_row
from lightning_memkit.micro_batching.proof.trial_values import PassedOverError, StepFailedError, TrialValues
from lightning_memkit.micro_batching.ranks.agreement import Ranks
from lightning_memkit.micro_batching.run import Run, Step
from lightning_memkit.micro_batching.shares.foreseen import ForeseenWronglyError
from lightning_memkit.optim.accumulation import ignoring_accumulation
from lightning_memkit.optim.methods import uses_closure_its_own_way
from lightning_memkit.utilities.generators import Generators, seed_all

_Look = Callable[[Tensor], Tensor]  # gets the loss; what it returns is differentiated
_NOTHING: Any = None


class Trials:
    """Runs trial steps of a module; weights, optimizer, RNG, buffers, metrics and logs end as they began.

    Args:
        run: the training loop.
        budget_bytes: the most bytes of a probe on the host; an accelerator's allocator has its own limit.

    Attributes:
        changes: what the latest `gradient_of` or `peak_of` changed besides gradients, less what a first step sets up.
        read: the gradients of the step before that steps were seen to read.
        changing: the keys of all tensors that trials saw changed in place; a `Rollback` clones these.
        logged: what the step of the latest `gradient_of` logged.
        handed_on: the attributes that the step on the batch before (`after=`) has set.
        returned, values: what the step returned besides its loss; with `look=`, numbers it computed, by their nodes.
        between: called after the step on the batch before (`after=`).
        capture: called within `gradient_of` after the step; its result is stored in `captured`.
        drawn: what the latest `gradient_of` left of Python's and NumPy's generators (`draws`), None for nothing.
        adds_up: steps give gradients to tensors in no optimizer, where they add up over steps.
        limited: probes must stay within the budget on a CPU.
        zeroes: a batch is one micro-batch, before whose backward the gradients of the step before are freed.
        watch: knows what trials saw steps change.
        complete: the hooks that get complete gradients.
    """

    def __init__(self, run: Run, budget_bytes: int | None = None) -> None:
        self.changing: frozenset[tuple[str, str]] = frozenset()
        self.changes: tuple[StepChange, ...] = ()
        self.read: dict[StepChange, None] = {}
        self.logged, self.handed_on = list[dict[str, Any]](), list[str]()
        self.returned, self.values = dict[str, Any](), dict[tuple[Any, int], Tensor]()
        self.capture: Callable[[], Any] | None = None
        self.captured, self.drawn, self.draws = _NOTHING, _NOTHING, EqualDraws(run.module)
        self.between: Callable[[], None] | None = None
        self.adds_up = self.limited = self.zeroes = False
        self._leaves, self.ranks, self.watch = list[Tensor](), Ranks(), StepWatch()
        self._has_watched, self._noted = False, NotedChanges(run, self)
        self._spares = SpareCopies(0)  # no copies: modules that stay as they are are walked over once
        self.complete = CompleteGradients(run.module, run.world_size)
        self._run, self._module = run, run.module
        self._budget_bytes, self.forget = budget_bytes, self._noted.forget

    @contextmanager
    def no_trace(
        self, step: Step, *parts: Any, seen: bool = False, after_backward: bool = False
    ) -> Iterator[list[dict[str, Any]]]:
        """A context in which a step leaves no trace; yields what it logs.

        Args:
            step: the current step.
            parts: the batches that it will run on, besides the step's own.
            seen: watch what it writes to even if that makes compiled functions run eagerly.
            after_backward: the gradients are the step's own and kept, and the batch is as before its step.
        """
        unwatched = self._has_watched and self._sees_too_little() and not seen
        rollback = self._rollback = self.kept(step, *parts, changing=self.changing if unwatched else None)
        # The previous step's gradients will be zeroed before use; keeping them beside the trial's would cost
        # their bytes twice. The step, a hook, or an optimizer with an own way to its closure may read them before.
        hooks = self._run.hooks_before_zero_grad()
        reads = bool(self.read or hooks) or uses_closure_its_own_way(step.optimizer)
        zeroed = step.starts_window and not after_backward and not reads
        leaves = self._leaves = rollback.leaves()
        with set_aside(leaves, outliving(step, leaves) if zeroed else leaves):
            try:
                with (
                    self._run.logging_held() as logged,
                    self._run.loggers_silent(),
                    torch.enable_grad(),
                    ignoring_accumulation(),  # micro-batches of a trial add up, and those of the run may not
                    nullcontext() if unwatched else rollback.watching(),
                    self.complete.held() if seen else nullcontext(lambda: None) as run_hooks,
                ):
                    if after_backward:
                        self.watch.put_batch_back()
                    yield logged
                    run_hooks()  # what they change is known from then on
            finally:
                try:
                    self.changing |= rollback.changed()
                finally:  # also where memory runs out in comparing
                    lost = rollback.restore()
                del self._rollback  # it refers to the optimizer's states, which the next step may exchange
        warn_of_lost(lost)

    def kept(self, step: Step, *parts: Any, changing: Keys | None = None) -> Rollback:
        """Record the state before a step, for a trial to restore."""
        known = {"beside": step.run.changed_beside(), "optimizers": step.run.steppers(step)}
        return Rollback(self._module, changing, batches=[step.batch, *parts], spares=self._spares, **known)

    def gradient_of(
        self, step: Step, batch: Any, *, seed: int | None = None, after: Any = None, look: _Look | None = None
    ) -> Tensor:
        """A sample of the gradient of a batch's own loss (see `sampled_gradient`).

        Args:
            step: the current step.
            batch: the rows to run.
            seed: draw other random numbers than training would.
            after: a batch that runs first, with the same random numbers; the state that it leaves stays for
                `batch`, and `handed_on` names the attributes that it has set.
            look: called with the loss; what it returns is differentiated instead.

        Raises:
            StepFailedError: the step fails on the batch, or returns None.
        """
        with self.no_trace(step, batch, after, seen=True) as self.logged:
            if seed is not None:
                seed_all(seed, self.draws.of_torch)
            skipped = False
            self.draws.begin()
            if after is not None:
                self._run_before(step, after)
                self.draws.restore()
            try:
                skipped = not self.run(step, batch, self._limit(step), look)
                if skipped:
                    raise ValueError("training_step returned None")
            except Exception as error:
                raise StepFailedError(error, skipped=skipped) from error
            gradient = decomposability.sampled_gradient(self._module.parameters())
            self.adds_up |= any(leaf.grad is not None for leaf in in_no_optimizer(step, self._leaves))
            self.captured = None if self.capture is None else self.capture()
            self.drawn = self.draws.drawn()
            own = self.returned, self.values
            self.watch.seen(self._rollback)
            self._noted.note(step, batch, self._rollback, self.logged)
            self.changes += tuple(self.read)
            self.returned, self.values = own  # not those of further steps, which `note` runs
            return gradient

    def loss_of(self, step: Step, batch: Any) -> float | None:
        """The loss of a batch; None if the step fails on it or returns None."""
        losses = list[float]()

        def look(loss: Tensor) -> Tensor:
            losses.append(float(loss.detach()))
            return loss

        with self.no_trace(step, batch, seen=True), suppress(Exception):
            # One row need not run; several are tried elsewhere.
            self.run(step, batch, self._limit(step), look)
            return losses[0] if losses else None
        return None

    def values_of(self, step: Step, batch: Any, *, gradient: bool) -> TrialValues:
        """What a step logs and returns for some rows, by a forward after the batch's backward.

        Args:
            step: the current step.
            batch: the rows.
            gradient: whether the forward builds a graph.

        Raises:
            StepFailedError: the step fails on the rows, or returns None.
        """
        with self.no_trace(step, batch, after_backward=True) as logged:
            generators = Generators(self.draws.of_torch)
            try:
                with torch.set_grad_enabled(gradient):
                    loss, returned = step.forward(self._run.transfer(batch))
            except Exception as error:
                raise StepFailedError(error, skipped=False) from error
            if loss is None:
                raise StepFailedError(ValueError("training_step returned None"), skipped=True)
            return TrialValues.of(loss, logged, returned, generators.drawn_from())

    def _run_before(self, step: Step, batch: Any) -> None:
        generators = Generators(self.draws.of_torch)
        self.run(step, batch, self._limit(step))
        generators.restore()
        if self.between is not None:
            self.between()
        self.handed_on = self._rollback.replaced()
        for leaf in self._leaves:
            leaf.grad = None

    def _limit(self, step: Step) -> PeakMeter | None:
        """The meter that stops a probe above the budget; None if none applies."""
        return self.within_budget(step) if self.limited else None

    def within_budget(self, step: Step) -> PeakMeter | None:
        """A meter that raises above the budget on a CPU; None on other devices, or without a budget."""
        return host_meter(step, self._budget_bytes)

    def run(self, step: Step, batch: Any, meter: PeakMeter | None = None, look: _Look | None = None) -> bool:
        """Forward and backward of a micro-batch; False if the step returned None."""
        reads = None if look is None else ReadGradients(step)

        def run(part: Any) -> bool:
            with TermValues() if look is not None else nullcontext() as noted, reads or nullcontext():
                loss, self.returned = step.forward(self._run.transfer(part))
            self.values = {} if noted is None else noted.values
            self.read |= dict.fromkeys(() if reads is None else reads.changes)
            if loss is None:
                if self.ranks.meets:  # the others wait in a backward that this rank does not run
                    raise PassedOverError("training_step returned None")
                return False
            for leaf in self._leaves if self.zeroes and meter is not None else ():
                leaf.grad = None
            step.quiet_backward(loss if look is None else look(loss))
            return True

        def measured() -> bool:
            with meter or nullcontext():
                return run(batch)

        return self.ranks.part(measured, smallest=lambda: run(one_row(batch)))

    def peak_of(self, step: Step, batch: Any, resident: list[Tensor], budget_bytes: int | None) -> int | None:
        """The peak of forward and backward of a micro-batch, with weights and gradients; None after an OOM.

        Args:
            step: the current step.
            batch: the micro-batch.
            resident: further tensors that are alive meanwhile.
            budget_bytes: the limit above which it counts as an OOM; None for no limit.

        Raises:
            StepFailedError: the step raised on fewer rows than the batch has (batch normalization of one row, say),
                so it does not run at this size. On the whole batch the user's own error is raised as it is.
        """
        if self._sees_too_little():
            self._watch_first(step, batch)
        failed = False
        with self.no_trace(step, batch) as logged:
            allocate_gradients(self._module.parameters())  # all are alive from the second micro-batch on
            weights, buffers = list(self._module.parameters()), self._module.buffers()
            grads = (p.grad for p in weights if p.grad is not None)
            meter = peak_meter(self._run.device, [*weights, *buffers, *resident, *grads], budget_bytes)
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
        """Raise the user's own error for the whole batch, and a `StepFailedError` for fewer rows."""
        if count_of_rows(batch) < count_of_rows(step.batch):
            raise StepFailedError(error, skipped=False) from error
        raise error

    def _sees_too_little(self) -> bool:
        """Whether peaks must be measured with compiled functions, whose writes a trial does not see."""
        return "torch._dynamo" in sys.modules and AllocatorMeter.counts(self._run.device)

    def _watch_first(self, step: Step, batch: Any) -> None:
        """Run the step once watched, to learn what it writes to, before it runs unwatched.

        Neither probes (in eval mode or without batch statistics a step writes to less) nor failed runs count.
        """
        if self._has_watched:
            return
        with self.no_trace(step, batch), suppress(RuntimeError, MemoryError):
            self.run(step, batch)
            self._has_watched = True

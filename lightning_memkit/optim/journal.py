"""Finishes an optimizer's step that runs out of memory, bit for bit as it would have been.

A journaled step advances one bucket of parameters after the other and keeps copies of what the bucket's step changes.
If memory runs out, the bucket is restored, caches are emptied, and smaller buckets are stepped: the gradients still
exist, so forward and backward are not repeated. The order in which parameters are stepped does not change the result.
An optimizer that combines values over the model, or may do so, is stepped as a whole. One that evaluates its closure
within the step (SAM, LBFGS) gets the closure; if memory runs out in there, everything is restored for a retry.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.optim.bundling import (
    BUNDLE_BYTES,
    bundle_bytes_for,
    communicates,
    may_slice,
    steps_by_parameter,
)
from lightning_memkit.optim.closures import gradients_are_zero, with_closure, zero_gradients
from lightning_memkit.optim.compensation import compensation_of
from lightning_memkit.optim.gradient_release import release_of
from lightning_memkit.optim.journaled_step import SMALLEST_BUNDLE_BYTES, BundledStep, show_overrides
from lightning_memkit.optim.methods import (
    demands_closure,
    living,
    refuse_differentiable,
    replace_step,
    stock_step,
    uses_closure_its_own_way,
)
from lightning_memkit.optim.pieces import slots
from lightning_memkit.optim.shadow import ShadowEngine
from lightning_memkit.optim.state_home import home_of
from lightning_memkit.optim.step_allocations import allocations_in
from lightning_memkit.optim.step_copies import WholeStepCopies
from lightning_memkit.optim.whole_step import step_whole

Closure = Callable[[], Any] | None

_MARK = "_memkit_journal"


class Journal:
    """The handle of an optimizer whose steps are journaled: when to journal, how often it helped, and the undo.

    Made by `journal_steps`.

    Attributes:
        needed: whether warm steps are journaled, too. Set it to False for a step that allocates nothing
            (`measure_next_warm_step` does so); it then costs nothing. Cold steps, which create states, are
            always journaled.
        recovered: how many times steps ran out of memory and were finished nevertheless.
    """

    def __init__(
        self, optimizer: Optimizer, ready: Callable[[], object] | None, bundle_bytes: int | None
    ) -> None:
        self.needed = True
        self.recovered = 0
        self._optimizer = ref(optimizer)  # weak, since the optimizer owns its journal
        self._ready = ready
        self._bundle_bytes = bundle_bytes or bundle_bytes_for(optimizer)
        self._by_parameter = steps_by_parameter(optimizer)
        self._compensation = compensation_of(optimizer)
        self._home = home_of(optimizer)
        self._plain = ShadowEngine.plain()
        self._may_slice = may_slice(optimizer)
        self._own_way = uses_closure_its_own_way(optimizer)
        self._asks = self._own_way or demands_closure(optimizer)
        self._gradients: dict[Parameter, Tensor] = {}  # those before a failed step that may be retried
        self._counts: dict[Parameter, int] = {}  # of each parameter's states, after its last cold step
        self._measures = False
        self._active = True
        self._stock_step = stock_step(optimizer)
        self._give_step_back = replace_step(optimizer, self._act)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer whose steps are journaled."""
        return living(self._optimizer)

    def undo(self) -> None:
        """Restore the optimizer's step."""
        if not self._active:
            return
        self._active = False
        self._gradients = {}
        own = getattr(self._optimizer(), "__dict__", {})  # empty if the optimizer was exchanged and is gone
        own.pop(_MARK, None)
        self._give_step_back()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within the context steps are not journaled; running out of memory there leaves a half-made step."""
        self._active = False
        try:
            yield
        finally:
            self._active = True
            self._note_counts()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """`measure_next_warm_step`, for the steps within the context only."""
        self._measures = True
        try:
            yield
        finally:
            self._measures = False

    def measure_next_warm_step(self) -> None:
        """Take the next warm step without a journal, and set `needed` by whether it allocates.

        Use it for a trial step, which is rolled back: running out of memory leaves a half-made step.
        """
        self._measures = True

    def is_cold(self) -> bool:
        """Whether the next step, with the current gradients, creates states."""
        state = self.optimizer.state
        stepped = [slot.parameter for slot in slots(self.optimizer) if slot.parameter.grad is not None]
        counts = [len(state[parameter]) if parameter in state else 0 for parameter in stepped]
        most = max(counts, default=0)
        # Some optimizers keep states for some parameters only, or none: use the counts of an earlier step.
        return any(
            count != self._counts.get(parameter, max(most, 1))
            for parameter, count in zip(stepped, counts, strict=True)
        )

    def _act(self, optimizer: Optimizer, closure: Closure) -> Any:
        if closure is None and self._asks and gradients_are_zero(optimizer):
            closure = partial(zero_gradients, optimizer)  # a trial of a step that may need a closure
            if self._own_way:
                self._measures = self.needed = False  # such a step is always copied
                return self._step_at_once(optimizer, closure)
        if not self._active:  # undone, but a scheduler made since has wrapped our step
            return self._step_at_once(optimizer, closure)
        self._check_order(optimizer)
        if self._own_way and closure is not None:
            return self._step_with_closure(optimizer, closure)
        if self._ready is not None:
            self._ready()
        cold = self.is_cold()
        if not cold and self._measures:
            self._measures = False
            self.needed = allocations_in(optimizer, lambda: self._step_at_once(optimizer, closure)) > 0
        elif not (cold or self.needed):
            self._step_at_once(optimizer, closure)
        elif self._by_parameter:
            self._step_in_bundles(optimizer, closure)
        else:
            self._step_whole(optimizer, closure)
        if cold:
            self._note_counts()
        return None

    def _note_counts(self) -> None:
        """Record how many states a step has left for each parameter."""
        optimizer = self.optimizer
        self._counts = {
            slot.parameter: len(optimizer.state.get(slot.parameter, ()))
            for slot in slots(optimizer)
            if slot.parameter.grad is not None or slot.parameter in self._counts
        }

    def _check_order(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        unlike = compensation_of(optimizer) is not self._compensation or home_of(optimizer) is not self._home
        if unlike or release_of(optimizer) is not None:
            raise RuntimeError(
                f"The step of {name} was changed after it was journaled (compensated, offloaded, released, or one of "
                "these undone): call .undo() on the journal before, and journal_steps(optimizer) after it."
            )

    def _engine_and_step(self) -> tuple[ShadowEngine, Callable[..., Any]]:
        if self._compensation is None:
            return self._plain, self._stock_step
        return self._compensation.engine, self._compensation.stock_step

    def _step_at_once(self, optimizer: Optimizer, closure: Closure) -> Any:
        """Take the step as it would be without a journal."""
        compensation = compensation_of(optimizer)
        if compensation is not None:
            return compensation.engine.step(optimizer, compensation.stock_step, closure)
        if home_of(optimizer) is not None:
            return self._plain.step(optimizer, self._stock_step, closure)
        return with_closure(self._stock_step, closure)()

    def _step_in_bundles(self, optimizer: Optimizer, closure: Closure) -> None:
        show_overrides(optimizer)
        engine, stock_step = self._engine_and_step()
        stock_step = with_closure(stock_step, closure)
        step = BundledStep(optimizer, engine, stock_step, self._bundle_bytes, may_slice=self._may_slice)
        step.run()
        self.recovered += step.failures
        if step.failures:
            smallest = min(self._bundle_bytes, SMALLEST_BUNDLE_BYTES)
            self._bundle_bytes = max(self._bundle_bytes // 2, smallest)

    def _step_whole(self, optimizer: Optimizer, closure: Closure) -> None:
        engine, _ = self._engine_and_step()
        tries = 1 if communicates(optimizer) else 2
        self.recovered += step_whole(
            optimizer, engine, lambda: self._step_at_once(optimizer, closure), tries=tries
        )

    def _step_with_closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Take a step that evaluates the model within; if memory runs out anywhere, restore everything and raise.

        The caller may retry the step. Ranks agree at its end, when the last gradients exist.
        """
        for parameter, gradient in self._gradients.items():
            if (
                parameter.grad is None
            ):  # the caller may have freed the gradients, and the retried step may begin by using them
                parameter.grad = gradient
        self._gradients = {}
        noise = self._engine_and_step()[0].rounding
        before = noise.state_dict()
        kept = WholeStepCopies(optimizer)
        try:
            result = self._step_at_once(optimizer, closure)
            if self._ready is not None:
                self._ready()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            noise.load_state_dict(before)
            with torch.no_grad():
                kept.restore()
            self._gradients = {
                slot.parameter: slot.parameter.grad
                for slot in slots(optimizer)
                if slot.parameter.grad is not None
            }
            raise
        return result


def journal_steps(
    optimizer: Optimizer, *, ready: Callable[[], object] | None = None, bundle_bytes: int | None = None
) -> Journal:
    """Make an optimizer's steps survive running out of memory; copies of one bucket are alive at a time.

    Weights, states and gradients are bitwise those of a step that did not run out. Optimizers that combine
    values over the model, and classes not known to step each parameter by itself, are stepped as a whole, with copies
    of all they change in host memory. Compensated optimizers and offloaded states work, too; call this last.

    Args:
        optimizer: any optimizer. If it uses its closure in a way of its own (SAM, LBFGS), everything it changes is
            copied to host memory in every step, because forward and backward run within it. If memory runs out there,
            the copies are restored and the error is raised, so that the caller may retry the step.
        ready: called in every step after its closure, before anything is changed, so that an error it raises
            leaves nothing changed. Ranks may agree here whether to step. If the step evaluates the closure
            itself, this is called at the end, and if it runs out of memory everything is restored.
        bundle_bytes: weights, gradients and states that are copied at a time. By default 8 MiB on a CPU; elsewhere 64
            MiB, or 1/32 of weights and moments if that is more. A larger parameter is stepped in slices if the
            optimizer is known to treat each element by itself, and is a bucket of its own if not.

    Returns:
        The handle; `Journal.undo` restores the optimizer's step.

    Raises:
        ValueError: the steps are journaled already, or gradients are released within backward; a group asks for a
            differentiable step.
    """
    if bundle_bytes is not None and bundle_bytes < 1:
        raise ValueError(f"bundle_bytes={bundle_bytes} must be 1 or more; 64 MiB is {BUNDLE_BYTES}.")
    name = type(optimizer).__name__
    if journal_of(optimizer) is not None:
        raise ValueError(f"The steps of this {name} are journaled already; call .undo() on the first handle.")
    if release_of(optimizer) is not None:
        raise ValueError(
            f"The gradients of this {name} are released: its parameters are stepped within backward, and their "
            "gradients are gone when a step fails. Journal steps, or release gradients."
        )
    refuse_differentiable(optimizer, "a journaled step")
    journal = optimizer.__dict__[_MARK] = Journal(optimizer, ready, bundle_bytes)
    return journal


def journal_of(optimizer: Optimizer) -> Journal | None:
    """The handle of an optimizer whose steps are journaled; None for any other."""
    return optimizer.__dict__.get(_MARK)

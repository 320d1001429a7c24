"""A trial step of the optimizer, for its states and its peak; weights and states are restored bitwise."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memkit.memory.measure import PeakMeter, peak_meter
from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching.ranks.agreement import (
    local_optimizer,
)
from lightning_memkit.micro_batching.run import Step
from lightning_memkit.optim.closures import trial_step
from lightning_memkit.optim.compensation import compensation_of
from lightning_memkit.optim.journal import journal_of
from lightning_memkit.optim.snapshots import (
    forget_new_states,
    known_states,
    restore_snapshot,
    take_snapshot,
)
from lightning_memkit.utilities.tensors import tensors_of


@contextmanager
def optimizer_state(step: Step) -> Iterator[tuple[list[Tensor], int]]:
    """A context in which the optimizer's states exist, after a trial step of zero gradients.

    Yields the states and the peak of the step. Weights, states, group scalars and compensation are restored
    bitwise from copies on the host after the step; states that it has made are removed at the end.
    """
    optimizer = local_optimizer(step.optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    gradients = [(p, p.grad) for p in parameters]
    known = known_states(optimizer)
    try:
        peak = _stepped_and_back(step, parameters)
        yield states_on(step.run.device, optimizer), peak
    finally:
        for p, gradient in gradients:
            p.grad = gradient
        forget_new_states(optimizer, known)


def _stepped_and_back(step: Step, parameters: list[nn.Parameter]) -> int:
    """The peak of a step; what it has changed is restored, states that it has made stay.

    The copies are freed before micro-batches are tried, because on a CPU they count towards the budget.
    """
    optimizer = local_optimizer(step.optimizer)
    owner: Any = compensation_of(optimizer)
    host = torch.device("cpu")
    snapshot = owner.snapshot(device=host) if owner else take_snapshot(optimizer, device=host)
    try:
        return _step_without_gradient(step, parameters)
    finally:
        if owner:
            owner.restore(snapshot, keep_new=True)
        else:
            restore_snapshot(optimizer, snapshot, keep_new=True)


def _step_without_gradient(step: Step, parameters: list[nn.Parameter]) -> int:
    allocate_gradients(parameters)
    held = [*step.run.module.parameters(), *step.run.module.buffers(), *tensors_of(step.batch)]
    held += [p.grad for p in parameters if p.grad is not None]
    device = step.run.device
    # ZeRO's own step would broadcast the trial's weights to ranks that have no copy to restore them from.
    optimizer = local_optimizer(step.optimizer)
    held += states_on(device, optimizer)
    meter = peak_meter(device, held)
    try:
        with meter, _without_hooks(optimizer):
            journal = journal_of(optimizer)
            # On a full accelerator the journal keeps its copies on the host, so they need not fit the budget.
            counts_copies = device.type == "cpu" or journal is None
            with nullcontext() if counts_copies or journal is None else journal.paused():
                # A journal recognizes a trial by its gradients, and passes the closure that it may need.
                trial_step(optimizer) if journal is None else optimizer.step()
            if journal is not None:
                with journal.measuring():
                    optimizer.step()
                # Once more for copies of states, which the first step did not have yet.
                if journal.needed and counts_copies:
                    optimizer.step()
    except (RuntimeError, TypeError) as error:  # it takes only sparse gradients, or requires a closure
        if is_out_of_memory(error):
            raise
        warnings.warn(
            f"MemoryBudget could not try a step of {type(optimizer).__name__} ({error}); its state is "
            "not in the verified peak.",
            stacklevel=2,
        )
    return meter.peak_bytes


def allocate_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give parameters gradients of zeros, in the dtype in which gradients are accumulated."""
    for p in parameters:
        if p.requires_grad:
            p.grad = torch.zeros_like(p, dtype=getattr(p, "grad_dtype", None) or p.dtype)


def states_on(device: torch.device, optimizer: Optimizer) -> list[Tensor]:
    """The states of an optimizer that are in a device's memory; others may be in host memory."""
    return [state for state in tensors_of(dict(optimizer.state)) if state.device.type == device.type]


@contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """A context without the user's step hooks (an EMA, say), which must not run in a trial."""
    hooks: tuple[Any, ...] = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    kept = [dict(registered) for registered in hooks]
    for registered in hooks:
        registered.clear()
    try:
        yield
    finally:
        for registered, before in zip(hooks, kept, strict=True):
            registered.update(before)


def host_meter(step: Step, budget_bytes: int | None) -> PeakMeter | None:
    """A meter of a step on the host, which raises above the budget; None on other devices, or without a budget."""
    device, module = step.run.device, step.run.module
    if budget_bytes is None or device.type != "cpu":
        return None
    held = [*module.parameters(), *module.buffers(), *tensors_of(step.batch)]
    return peak_meter(device, [*held, *states_on(device, local_optimizer(step.optimizer))], budget_bytes)

"""How an optimizer's step uses its closure: once at its start (torch's convention), or in a way of its own.

A step that evaluates its closure once at its start may be given gradients instead, and may be taken bucket by
bucket. A step that evaluates it later, again, conditionally or through another object (SAM, LBFGS, line
searches, wrappers) needs the closure itself: without it, it would compute something else. The step's own
source decides. A step whose source does not prove the convention counts as having a way of its own, which
costs copies of what the step changes and is always correct.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.optim.closure_source import is_conventional

# Attribute of a step that we install: whether the step it replaces has a way of its own.
_OUR_WAY = "_memkit_own_way"


def evaluates_in_its_own_way(optimizer: Any) -> bool:
    """Whether a step uses its closure in any other way than evaluating it once, before anything else, or not at all.

    Args:
        optimizer: any. If `step` was replaced on this one object, the replacement is read.
    """
    step = optimizer.__dict__.get("step")
    if hasattr(step, _OUR_WAY):
        return getattr(step, _OUR_WAY)
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        return not is_conventional(getattr(step, "__func__", step), None)
    return not is_conventional(type(optimizer).step, type(optimizer))


def demands_closure(optimizer: Optimizer) -> bool:
    """Whether a step can't be called without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def note_way(step: Any, own_way: bool) -> None:
    """Record on our replacement of a step whether the original uses closures in a way of its own."""
    step.__dict__[_OUR_WAY] = own_way


def is_our_replacement(step: Any) -> bool:
    """Whether this package installed the step in place of the optimizer's own."""
    return hasattr(step, _OUR_WAY)


def with_closure(step: Callable[..., Any], closure: Callable[[], Any] | None) -> Callable[[], Any]:
    """Bind a closure to a step under the step's name for it; a step that takes none is returned as it is."""
    if closure is None:
        return step
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        return partial(step, closure)
    if getattr(step, "__func__", None) is not None and not inspect.ismethod(
        step
    ):  # our WeakMethod: the signature lists self
        parameters = parameters[1:]
    named = any(p.name == "closure" and p.kind is not p.POSITIONAL_ONLY for p in parameters)
    if named or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return partial(step, closure=closure)
    takes = any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)
    return partial(step, closure) if takes else step


def zero_gradients(optimizer: Optimizer) -> Tensor:
    """The closure of a trial step: sets gradients to zero, in place where they exist, and returns a loss of zero."""
    with torch.no_grad():
        for parameter in _parameters(optimizer):
            if parameter.grad is not None:
                parameter.grad.zero_()
            elif parameter.requires_grad:
                dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
                parameter.grad = torch.zeros_like(parameter, dtype=dtype)
    return torch.zeros((), requires_grad=True)


def gradients_are_zero(optimizer: Optimizer) -> bool:
    """Whether a step is a trial: every gradient exists and is zero."""
    gradients = [parameter.grad for parameter in _parameters(optimizer) if parameter.requires_grad]
    try:
        return all(gradient is not None and not gradient.any() for gradient in gradients)
    except RuntimeError as error:  # out of memory on this test: the step itself will fail and report it
        if not is_out_of_memory(error):
            raise
        return False


def trial_step(optimizer: Optimizer) -> None:
    """Take a step with gradients of zero; where the step needs a closure, it gets `zero_gradients`."""
    if evaluates_in_its_own_way(optimizer) or demands_closure(optimizer):
        with_closure(optimizer.step, partial(zero_gradients, optimizer))()
    else:
        optimizer.step()


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]

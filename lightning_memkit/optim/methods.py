"""The step of one optimizer: its own, replacements that don't keep it alive, and refusals of unsupported ones."""

import inspect
import sys
from collections.abc import Callable
from functools import update_wrapper, wraps
from typing import Any, cast
from weakref import ref

import torch
from torch.optim import Optimizer

from lightning_memkit.optim.closures import demands_closure, evaluates_in_its_own_way, note_way
from lightning_memkit.utilities.patching import Undo

# Optimizers of the libraries in `_BY_PARAMETER` step each parameter by itself, except those that
# `combines_over_the_model` knows.
COMPENSATION = "_memkit_compensation"  # the attribute that holds a compensated optimizer's handle
SLOTS = "_memkit_slots"  # what a replaced step remembers of its parameters
_BY_PARAMETER = (
    "torch.optim.",
    "bitsandbytes.optim.",
    "lion_pytorch.",
    "optimi.",
    "schedulefree.",
    "torchao.optim.",
    "transformers.optimization.",
)
# Attributes that a subclass may define without changing its step.
_WITHOUT_EFFECT = frozenset(
    {
        "__module__",
        "__doc__",
        "__init__",
        "__repr__",
        "__annotations__",
        "__firstlineno__",
        "__static_attributes__",
    }
)


class WeakMethod:
    """A bound method that does not keep its object alive; it has the ``__func__`` that LR schedulers read."""

    def __init__(self, function: Callable[..., Any], owner: Any) -> None:
        self.__func__ = function
        self._owner = ref(owner)
        update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with its owner."""
        return self.__func__(self._owner(), *args, **kwargs)


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer that steps this rank's shard: the inner one of ZeRO-1, or the given one."""
    return cast(Any, optimizer).optim if _is_zero_redundancy(optimizer) else optimizer


def is_compensated_optimizer(optimizer: Optimizer) -> bool:
    """Whether `compensate` has replaced the step of an optimizer, or of ZeRO-1's inner one."""
    return COMPENSATION in local_optimizer(optimizer).__dict__


def _is_zero_redundancy(optimizer: Optimizer) -> bool:
    # A user who has such an optimizer has imported the module; importing it here would warn.
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return isinstance(optimizer, getattr(module, "ZeroRedundancyOptimizer", ()))


def living(reference: "ref[Optimizer]") -> Optimizer:
    """The optimizer behind a handle's weak reference.

    Raises:
        ReferenceError: the optimizer no longer exists.
    """
    optimizer = reference()
    if optimizer is None:
        raise ReferenceError("The optimizer is gone; keep a reference to it beside the handle.")
    return optimizer


def replaced_step(
    optimizer: Optimizer,
    act: Callable[[Optimizer, Callable[[], Any] | None], Any],
    *,
    wrapped: bool,
) -> WeakMethod:
    """A step that calls ``act`` in place of the optimizer's own step, and returns the closure's loss.

    By torch's convention the closure is evaluated once, before anything else; ``act`` then gets a closure
    that only returns the loss, for steps that compute with it. If the optimizer's own step uses its closure
    in another way, ``act`` gets the closure itself, and its result is the step's.

    Args:
        optimizer: the optimizer whose step is replaced.
        act: takes the step, under `no_grad` if the convention holds; it must not refer to the optimizer.
        wrapped: whether to carry the mark of LR schedulers' own wrapper, whose work this step does.
    """
    own_way = uses_closure_its_own_way(optimizer)

    @wraps(type(optimizer).step)
    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]  # as schedulers expect
        if own_way and closure is not None:
            return act(optimizer, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            act(optimizer, None if closure is None else lambda: loss)
        return loss

    # torch's own wrapper adds the profiler label and calls the user's step hooks once per step.
    method = WeakMethod(Optimizer.profile_hook_step(step), optimizer)
    note_way(method, own_way)
    if wrapped:
        method.__dict__["_wrapped_by_lr_sched"] = True
    return method


def uses_closure_its_own_way(optimizer: Optimizer) -> bool:
    """Whether a step needs the closure itself: it evaluates it again, late, or conditionally (SAM, LBFGS)."""
    return evaluates_in_its_own_way(local_optimizer(optimizer))


def replace_step(optimizer: Optimizer, act: Callable[[Optimizer, Callable[[], Any] | None], Any]) -> Undo:
    """Make ``optimizer.step`` a `replaced_step` that calls ``act``.

    Returns:
        The undo. It does nothing if the optimizer is gone, or if a scheduler made since has wrapped the step: the
        wrapper stays, and calls ``act``.
    """
    previous = optimizer.__dict__.get("step")
    wrapped = hasattr(previous, "_wrapped_by_lr_sched")  # by an earlier LR scheduler
    step = replaced_step(optimizer, act, wrapped=wrapped)
    optimizer.step = step  # pyright: ignore[reportAttributeAccessIssue]
    # Weak: a handle that has the undo, and whose method the step calls, would be a cycle that keeps the weights.
    owner, ours = ref(optimizer), ref(step)

    def undo() -> None:
        optimizer = owner()
        current = None if optimizer is None else optimizer.__dict__.get("step")
        if optimizer is None or current is None or current is not ours():
            return
        optimizer.__dict__.pop(SLOTS, None)
        if previous is None:
            del optimizer.__dict__["step"]
        else:
            optimizer.step = previous

    return undo


def refuse_closures(optimizer: Optimizer, what: str) -> None:
    """Refuse a step that evaluates the model by itself, or that is to be differentiated.

    Args:
        optimizer: any.
        what: the way of stepping that does not support this, as the subject of a sentence.

    Raises:
        TypeError: the step demands a closure, or does not evaluate it exactly once before anything else.
        ValueError: a group asks for a differentiable step.
    """
    name = type(optimizer).__name__
    demands = demands_closure(optimizer)
    if demands or uses_closure_its_own_way(optimizer):
        does = "demands a closure" if demands else "evaluates its closure in a way of its own"
        raise TypeError(
            f"{name}.step {does}: it may evaluate the model several times a step, which {what} can't do; "
            "use an optimizer such as AdamW."
        )
    refuse_differentiable(optimizer, what)


def refuse_differentiable(optimizer: Optimizer, what: str) -> None:
    """Refuse a step that is to be differentiated.

    Raises:
        ValueError: a group asks for a differentiable step.
    """
    if any(group.get("differentiable") for group in optimizer.param_groups):
        name = type(optimizer).__name__
        raise ValueError(f"{name} has differentiable=True, and {what} can't be; leave it False.")


def refuse_zero_redundancy(optimizer: Optimizer, what: str) -> None:
    """Refuse ZeRO-1: its step calls an inner optimizer, sends weights, and ignores the parameters it is shown.

    Args:
        optimizer: any.
        what: the way of stepping that shows an optimizer only some of its parameters, as the subject of a
            sentence.

    Raises:
        TypeError: it is a `ZeroRedundancyOptimizer`.
    """
    if _is_zero_redundancy(optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} steps and sends the weights of this rank's share all at once, which {what} "
            "can't follow; shard weights and states by FSDP2 instead, or use an optimizer such as AdamW."
        )


def refuse_sums_over_the_model(optimizer: Optimizer, what: str) -> None:
    """Refuse a step that combines values of all parameters.

    Args:
        optimizer: any.
        what: the way of stepping that does not see all parameters at once, as the subject of a sentence.

    Raises:
        ValueError: the optimizer clips by the norm of all gradients, or estimates one step size from them.
    """
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if _clips_by_the_norm(group):
            raise ValueError(
                f"{name} clips by the norm of all gradients itself (max_grad_norm={group['max_grad_norm']}), which "
                f"{what} can't see; set it to 0 or None, and clip before the step (Trainer(gradient_clip_val=...))."
            )
        if _estimates_the_step_size(group):
            raise ValueError(
                f"{name} estimates one step size from all parameters (Prodigy, D-Adaptation), which {what} can't "
                "see; use an optimizer such as AdamW."
            )


def combines_over_the_model(optimizer: Optimizer) -> bool:
    """Whether a step is known to depend on all gradients at once, through their norm or an estimated step size."""
    return any(
        _clips_by_the_norm(group) or _estimates_the_step_size(group) for group in optimizer.param_groups
    )


def _clips_by_the_norm(group: dict[str, Any]) -> bool:
    return bool(group.get("max_grad_norm"))


def _estimates_the_step_size(group: dict[str, Any]) -> bool:
    return "d" in group and "growth_rate" in group  # Prodigy, D-Adaptation


def stock_step(optimizer: Optimizer) -> Callable[..., Any]:
    """The optimizer's own step, without wrappers (hooks, profiler), which go around our whole step instead."""
    if has_own_step(optimizer):
        return optimizer.__dict__["step"]
    function = type(optimizer).step
    if getattr(function, "hooked", False):
        function = inspect.unwrap(function, stop=lambda wrapped: not getattr(wrapped, "hooked", False))
    return WeakMethod(function, optimizer)


def has_own_step(optimizer: Optimizer) -> bool:
    """Whether the step of this one optimizer object was replaced: then the replacement is the user's step."""
    step = optimizer.__dict__.get("step")
    return step is not None and not hasattr(step, "_wrapped_by_lr_sched")


def is_known_by_parameter(optimizer: Optimizer) -> bool:
    """Whether a step is known to step each parameter by itself and to keep values only in states and groups."""
    replaced = has_own_step(optimizer) or uses_closure_its_own_way(optimizer)
    return not replaced and is_known_class(optimizer)


def is_known_class(optimizer: Optimizer) -> bool:
    """Whether an optimizer is from one of a few known libraries; a subclass may not override any of their methods."""
    names: set[str] = set()
    for each in type(optimizer).__mro__:
        if f"{each.__module__}.".startswith(_BY_PARAMETER):
            return not any(hasattr(each, name) for name in names)
        names |= vars(each).keys() - _WITHOUT_EFFECT
    return False

"""Methods of one optimizer: the step that is its own, and replacements that don't keep it alive."""

import inspect
from collections.abc import Callable
from functools import update_wrapper
from typing import Any
from weakref import ref

from torch.optim import Optimizer


class WeakMethod:
    """A bound method that doesn't keep its object alive; LR schedulers ask for ``__func__``."""

    def __init__(self, function: Callable[..., Any], owner: Any) -> None:
        self.__func__ = function
        self._owner = ref(owner)
        update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with its owner."""
        return self.__func__(self._owner(), *args, **kwargs)


def stock_step(optimizer: Optimizer) -> Callable[..., Any]:
    """The optimizer's own step, without the wrappers that belong around the whole of ours."""
    if has_own_step(optimizer):
        return optimizer.__dict__["step"]
    function = type(optimizer).step
    if getattr(function, "hooked", False):
        function = inspect.unwrap(function, stop=lambda wrapped: not getattr(wrapped, "hooked", False))
    return WeakMethod(function, optimizer)


def has_own_step(optimizer: Optimizer) -> bool:
    """Whether somebody has replaced the step of this one optimizer: then that is what the user's step means."""
    step = optimizer.__dict__.get("step")
    return step is not None and not hasattr(step, "_wrapped_by_lr_sched")

"""Compensates an optimizer within its first step: one that nobody announced, made or exchanged at any time.

torch calls a hook in each step of each optimizer. The step that is under way then can't be exchanged any more;
instead the parameters are float32 for as long as it runs, as they are for optimizers that know them by identity.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_memkit.optim.blocks import is_sharded
from lightning_memkit.optim.compensation import Compensation, compensation_of
from lightning_memkit.optim.open_step import OpenStep
from lightning_memkit.optim.pieces import is_compensated, slots
from lightning_memkit.utilities.patching import Undo


def compensate_first_steps(
    is_ours: Callable[[Optimizer], bool], compensated: Callable[[Optimizer], Compensation]
) -> Undo:
    """Compensate optimizers that are not yet in their first step; it takes 16 bytes a parameter more.

    Args:
        is_ours: whether an optimizer that is not compensated, and steps bfloat16 weights, ought to be.
        compensated: compensates it.

    Returns:
        The undo. Optimizers stay compensated.

    Raises:
        TypeError: in the step, if its parameters are sharded.
    """
    under_way: dict[int, tuple[OpenStep, AbstractContextManager[Any]]] = {}

    def before(optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        if compensation_of(optimizer) is not None or id(optimizer) in under_way:
            return None
        # Within a wrapper's compensated step those that are trained are float32, and only frozen ones bfloat16.
        if not any(_is_trained_in_bfloat16(slot.parameter) for slot in slots(optimizer)):
            return None
        if not is_ours(optimizer):
            return None
        _refuse_sharded(optimizer)
        compensation = compensated(optimizer)
        step = compensation.engine.begin(optimizer, compensation.stock_step)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        shown = step.shown_float32(closure)
        under_way[id(optimizer)] = step, shown
        evaluate = shown.__enter__()
        if closure is None:
            return None
        return (args[0], evaluate, *args[2:]), {key: one for key, one in kwargs.items() if key != "closure"}

    def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step, shown = under_way.pop(id(optimizer), (None, None))
        if step is None or shown is None:
            return
        shown.__exit__(None, None, None)
        step.finish()
        for hook in list(optimizer._optimizer_step_post_hooks.values()):  # were hidden while it stepped
            hook(optimizer, args, kwargs)

    handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)

    def undo() -> None:
        for handle in handles:
            handle.remove()
        for _, shown in under_way.values():  # of steps that failed: weights become bfloat16 again
            error = RuntimeError("the step has failed")
            try:
                shown.__exit__(type(error), error, None)
            except RuntimeError as raised:
                if raised is not error:
                    raise
        under_way.clear()

    return undo


def _is_trained_in_bfloat16(parameter: Tensor) -> bool:
    return is_compensated(parameter) and (parameter.requires_grad or parameter.grad is not None)


def _refuse_sharded(optimizer: Optimizer) -> None:
    if any(is_sharded(slot.parameter) for slot in slots(optimizer)):
        name = type(optimizer).__name__
        raise TypeError(
            f"{name} steps sharded bfloat16 weights (DTensor), and the Trainer doesn't know it: its step would lose "
            "small updates. Return it from configure_optimizers, or train in float32 (precision='32-true')."
        )

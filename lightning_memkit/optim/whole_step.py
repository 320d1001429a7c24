"""One optimizer step, taken as a whole, that survives running out of memory; copies of all it changes are on the host.

After a failed try everything it changed is restored, its tensors are freed and caches are emptied.
"""

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from lightning_memkit.memory.out_of_memory import free_memory, is_out_of_memory
from lightning_memkit.optim.shadow import ShadowEngine
from lightning_memkit.optim.step_copies import StepCopies, WholeStepCopies
from lightning_memkit.utilities.generators import Generators


class StepOutOfMemoryError(torch.OutOfMemoryError):
    """An optimizer's step ran out of memory, even in its smallest buckets.

    Attributes:
        half_stepped: whether some parameters have been stepped and others not. If False, weights, states and
            gradients are bit for bit as before the step.
    """

    def __init__(self, message: str, *, half_stepped: bool) -> None:
        super().__init__(message)
        self.half_stepped = half_stepped


def step_whole(
    optimizer: Optimizer, engine: ShadowEngine, act: Callable[[], object], *, tries: int = 2
) -> int:
    """Step all parameters at once; copies of weights, gradients and states are in host memory meanwhile.

    Args:
        optimizer: any.
        engine: the engine that steps its parameters.
        act: takes the step.
        tries: how often it is tried; once if the step communicates, since other ranks can't repeat theirs.

    Returns:
        How many tries have run out of memory.

    Raises:
        StepOutOfMemoryError: all tries have.
    """
    noise, generators = engine.rounding.state_dict(), Generators()

    def take_back() -> None:
        engine.rounding.load_state_dict(noise)
        generators.restore()  # of an optimizer that draws: its next try draws the same numbers

    failures = 0
    while (failure := tried_on_copies(lambda: WholeStepCopies(optimizer), act, take_back)) is not None:
        failures += 1
        if failures == tries:
            state = "Weights, states and gradients are as before the step."
            raise step_error(optimizer, failure, "as a whole", state, half_stepped=False)
    return failures


def tried_on_copies(
    copy: Callable[[], StepCopies], act: Callable[[], object], take_back: Callable[[], object]
) -> str | None:
    """Copy what an action changes, and run it; if either runs out of memory, restore and return the error's text.

    Args:
        copy: makes the copies.
        act: the action.
        take_back: undoes what the copies do not cover; called before they are restored.
    """
    kept: list[StepCopies] = []

    def copy_and_act() -> None:
        kept.append(copy())
        act()

    def put_back() -> None:
        if kept:  # otherwise the copies ran out of memory, and nothing has changed
            take_back()
            kept[0].restore()

    return tried(copy_and_act, put_back)


def tried(action: Callable[[], object], put_back: Callable[[], object] = lambda: None) -> str | None:
    """Run an action; if it runs out of memory, undo it, free its memory, and return the error's text."""
    try:
        action()
        return None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failure = str(error)
    # Outside the handler, where the traceback would keep the step's tensors alive.
    put_back()
    free_memory()
    return failure


def step_error(
    optimizer: Optimizer, failure: str, where: str, state: str, *, half_stepped: bool
) -> StepOutOfMemoryError:
    """The error that says where a step ran out of memory, why, in which state everything is, and what helps."""
    return StepOutOfMemoryError(
        f"The step of {type(optimizer).__name__} runs out of memory {where}, and again when it is repeated "
        f"({failure}). {state} Let states take less memory: 8-bit optimizers, or offload_states(optimizer).",
        half_stepped=half_stepped,
    )

"""One optimizer step, taken as a whole, that survives running out of memory; copies of all it changes are on the host.

After a failed try everything it changed is restored, its tensors are freed and caches are emptied.
"""

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from lightning_memkit.memory.out_of_memory import free_memory, is_out_of_memory
from lightning_memkit.optim.shadow import ShadowEngine
from lightning_memkit.optim.step_copies import WholeStepCopies
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
    failure = ""
    for failures in range(tries):
        failure = _attempt_whole(optimizer, engine, act)
        if failure is None:
            return failures
    state = "Weights, states and gradients are as before the step."
    raise step_error(optimizer, failure or "", "as a whole", state, half_stepped=False)


def _attempt_whole(optimizer: Optimizer, engine: ShadowEngine, act: Callable[[], object]) -> str | None:
    noise, generators = engine.rounding.state_dict(), Generators()
    kept: list[WholeStepCopies] = []
    failure = tried(lambda: kept.append(WholeStepCopies(optimizer)))
    if failure is not None:
        return failure

    def put_back() -> None:
        engine.rounding.load_state_dict(noise)
        kept[0].restore()
        generators.restore()  # of an optimizer that draws: its next try draws the same numbers

    return tried(act, put_back)


def tried(action: Callable[[], object], put_back: Callable[[], object] | None = None) -> str | None:
    """Run an action; if it runs out of memory, undo it, free its memory, and return the error's text."""
    try:
        action()
        return None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failure = str(error)
    # Outside the handler, where the traceback would keep the step's tensors alive.
    if put_back is not None:
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

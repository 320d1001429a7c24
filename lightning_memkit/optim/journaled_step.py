"""One optimizer step that survives running out of memory: bundle by bundle, or whole with all it changes on the host.

What a failed attempt changed is put back, its tensors are let go and caches are emptied before the next one.
"""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.optim.pieces import Slot, slots
from lightning_memkit.optim.shadow import OpenStep, ShadowEngine
from lightning_memkit.optim.step_copies import Room, StepCopies, WholeStepCopies, bytes_to_copy


class StepOutOfMemoryError(torch.OutOfMemoryError):
    """An optimizer's step ran out of memory, also in its smallest parts.

    Attributes:
        half_stepped: whether some parameters have been stepped and others not. If False, weights, states and
            gradients are bit for bit as before the step.
    """

    def __init__(self, message: str, *, half_stepped: bool) -> None:
        super().__init__(message)
        self.half_stepped = half_stepped


class BundledStep:
    """A step of one bundle of parameters after the other; copies of one bundle are alive at a time.

    Args:
        optimizer: one that steps each parameter by itself.
        engine: what steps its parameters.
        stock_step: the optimizer's own step.
        bundle_bytes: copies at a time; a parameter with more is a bundle of its own.

    Attributes:
        failures: how many attempts have run out of memory.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        engine: ShadowEngine,
        stock_step: Callable[..., Any],
        bundle_bytes: int,
    ) -> None:
        self.failures = 0
        self._optimizer = optimizer
        self._engine = engine
        self._stock_step = stock_step
        self._bundle_bytes = bundle_bytes
        self._left = [slot for slot in slots(optimizer) if slot.parameter.grad is not None]
        self._count = len(self._left)
        self._room = Room()

    def run(self) -> None:
        """Make the step.

        Raises:
            StepOutOfMemoryError: a single parameter can't be stepped.
        """
        rounding = self._engine.rounding
        noise = rounding.state_dict()
        try:
            step = self._opened()
            while self._left:
                self._advance_next(step)
            self._finish(step)
        except StepOutOfMemoryError as error:
            if not error.half_stepped:
                rounding.load_state_dict(noise)
            raise
        finally:
            rounding.end_step()

    def _opened(self) -> OpenStep:
        opened: list[OpenStep] = []

        def begin() -> None:
            opened.append(self._engine.begin(self._optimizer, self._stock_step))

        failure = self._tried(begin)
        if failure is not None:
            failure = self._tried(begin)
        if failure is not None:
            raise self._error(failure, "before its first parameter")
        return opened[0]

    def _advance_next(self, step: OpenStep) -> None:
        """Step the next bundle, or make bundles smaller; a single parameter is tried again as it is."""
        bundle, size = self._next_bundle()
        failure = self._attempt(step, bundle, on_host=False)
        if failure is not None and len(bundle) > 1:
            self._bundle_bytes = size // 2
            return
        for _ in range(2):  # its copies no longer take the device's memory
            if failure is not None:
                failure = self._attempt(step, bundle, on_host=True)
        if failure is not None:
            slot = bundle[0]
            raise self._error(
                failure, f"for parameter {slot.index} of shape {tuple(slot.parameter.shape)} alone"
            )
        del self._left[: len(bundle)]

    def _next_bundle(self) -> tuple[list[Slot], int]:
        bundle: list[Slot] = []
        size = 0
        for slot in self._left:
            slot_bytes = bytes_to_copy(self._optimizer, slot.parameter)
            if bundle and size + slot_bytes > self._bundle_bytes:
                break
            bundle.append(slot)
            size += slot_bytes
        return bundle, size

    def _attempt(self, step: OpenStep, bundle: list[Slot], *, on_host: bool) -> str | None:
        """Step a bundle; where that fails, everything is as before, and the answer is why."""
        kept: list[StepCopies] = []
        failure = self._tried(
            lambda: kept.append(
                StepCopies(
                    self._optimizer,
                    bundle,
                    on_host=on_host,
                    room=self._room,
                    reads_gradient=self._reads_gradient,
                )
            )
        )
        if failure is not None:
            return failure

        def put_back() -> None:
            step.take_back(bundle)
            kept[0].restore()

        return self._tried(lambda: step.advance(bundle), put_back)

    def _reads_gradient(self, slot: Slot) -> bool:
        """Whether a step is known to leave the gradient as it is; some use it up, or unscale it."""
        gradient = slot.parameter.grad
        if self._engine.shadows(slot.parameter):
            return gradient is not None and gradient.dtype != torch.float32  # the shadow's is another
        fused = self._optimizer.param_groups[slot.group].get("fused")
        return type(self._optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not fused

    def _finish(self, step: OpenStep) -> None:
        failure = self._tried(step.finish)
        if failure is not None:
            failure = self._tried(step.finish)
        if failure is not None:
            if not self._count:
                step.take_back([])
            raise self._error(failure, "after its last parameter")

    def _tried(
        self, action: Callable[[], object], put_back: Callable[[], object] | None = None
    ) -> str | None:
        failure = tried(action, put_back)
        if failure is not None:
            self.failures += 1
            self._room = Room()
        return failure

    def _error(self, failure: str, where: str) -> StepOutOfMemoryError:
        stepped = self._count - len(self._left)
        state = "Weights, states and gradients are as before the step."
        if stepped:
            state = (
                f"{stepped} of {self._count} parameters have been stepped and the others not: the weights are of "
                "half a step; go on from a checkpoint."
            )
        return _step_error(self._optimizer, failure, where, state, half_stepped=stepped > 0)


def step_whole(
    optimizer: Optimizer, engine: ShadowEngine, act: Callable[[], object], *, tries: int = 2
) -> int:
    """A step of all parameters at once; copies of weights, gradients and states lie in host memory meanwhile.

    Args:
        optimizer: any.
        engine: what steps its parameters.
        act: makes the step.
        tries: how often it is tried; once where a step communicates, since other ranks can't repeat theirs.

    Returns:
        How many attempts have run out of memory.

    Raises:
        StepOutOfMemoryError: all have.
    """
    failure = ""
    for failures in range(tries):
        failure = _attempt_whole(optimizer, engine, act)
        if failure is None:
            return failures
    state = "Weights, states and gradients are as before the step."
    raise _step_error(optimizer, failure or "", "as a whole", state, half_stepped=False)


def _attempt_whole(optimizer: Optimizer, engine: ShadowEngine, act: Callable[[], object]) -> str | None:
    noise = engine.rounding.state_dict()
    kept: list[WholeStepCopies] = []
    failure = tried(lambda: kept.append(WholeStepCopies(optimizer)))
    if failure is not None:
        return failure

    def put_back() -> None:
        engine.rounding.load_state_dict(noise)
        kept[0].restore()

    return tried(act, put_back)


def tried(action: Callable[[], object], put_back: Callable[[], object] | None = None) -> str | None:
    """Run an action; where it runs out of memory put back what it changed, free what it held, and say why."""
    try:
        action()
        return None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failure = str(error)
    # Only here, since within the handler the traceback holds the step's tensors.
    if put_back is not None:
        put_back()
    gc.collect()
    if torch.accelerator.is_available():
        empty = getattr(torch.accelerator, "empty_cache", None) or torch.cuda.empty_cache
        empty()
    return failure


def _step_error(
    optimizer: Optimizer, failure: str, where: str, state: str, *, half_stepped: bool
) -> StepOutOfMemoryError:
    return StepOutOfMemoryError(
        f"The step of {type(optimizer).__name__} runs out of memory {where}, and again when it is repeated "
        f"({failure}). {state} Let states take less memory: 8-bit optimizers, or offload_states(optimizer).",
        half_stepped=half_stepped,
    )

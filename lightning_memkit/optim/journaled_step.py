"""One optimizer step that survives running out of memory, bucket by bucket.

A parameter that is larger than a bucket is stepped in slices if its optimizer treats each element by itself.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from lightning_memkit.optim.eight_bit import is_bitsandbytes
from lightning_memkit.optim.open_step import OpenStep
from lightning_memkit.optim.pieces import Slot, buckets_within, slots
from lightning_memkit.optim.shadow import ShadowEngine
from lightning_memkit.optim.slices import SlicedParameter, is_sliceable
from lightning_memkit.optim.step_copies import Room, StepCopies, bytes_to_copy
from lightning_memkit.optim.whole_step import StepOutOfMemoryError, step_error, tried, tried_on_copies

SMALLEST_BUNDLE_BYTES = 1 << 20
T = TypeVar("T")


class BundledStep:
    """A step of one bucket of parameters after the other; copies of one bucket are alive at a time.

    Args:
        optimizer: one that steps each parameter by itself.
        engine: the engine that steps its parameters.
        stock_step: the optimizer's own step.
        bundle_bytes: bytes of copies at a time. A larger parameter is stepped in slices if possible, and is a
            bucket of its own otherwise.
        may_slice: whether the stock step treats each element of a parameter by itself.

    Attributes:
        failures: how many tries have run out of memory.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        engine: ShadowEngine,
        stock_step: Callable[..., Any],
        bundle_bytes: int,
        *,
        may_slice: bool,
    ) -> None:
        self.failures = 0
        self._optimizer = optimizer
        self._engine = engine
        self._stock_step = stock_step
        self._bundle_bytes = bundle_bytes
        self._may_slice = may_slice
        self._sliced: SlicedParameter | None = None  # the parameter that is being stepped in slices
        self._left = [slot for slot in slots(optimizer) if slot.parameter.grad is not None]
        self._count = len(self._left)
        self._room = Room()

    def run(self) -> None:
        """Take the step.

        Raises:
            StepOutOfMemoryError: a single parameter, or its smallest slice, can't be stepped.
        """
        rounding = self._engine.rounding
        noise = rounding.state_dict()
        try:
            step = self._twice(
                lambda: self._engine.begin(self._optimizer, self._stock_step), "before its first parameter"
            )
            while self._left:
                self._advance_next(step)
            self._finish(step)
        except StepOutOfMemoryError as error:
            if not error.half_stepped:
                rounding.load_state_dict(noise)
            raise
        finally:
            rounding.end_step()

    def _twice(self, make: Callable[[], T], where: str) -> T:
        """The result of an action that changes nothing if it fails; it is tried twice."""
        made: list[T] = []
        failure = self._counted(tried(lambda: made.append(make())))
        if failure is not None:
            failure = self._counted(tried(lambda: made.append(make())))
        if failure is not None:
            raise self._error(failure, where)
        return made[0]

    def _finish(self, step: OpenStep) -> None:
        try:
            self._twice(step.finish, "after its last parameter")
        except StepOutOfMemoryError:
            if not self._count:  # the stock step was shown no parameter, and may have counted nevertheless
                step.take_back([])
            raise

    def _advance_next(self, step: OpenStep) -> None:
        """Step the next bucket or slice; on failure, make the next ones smaller."""
        if self._sliced is not None:
            self._advance_slice(step, self._sliced)
            return
        bundle = next(buckets_within(self._left, self._bytes_of, self._bundle_bytes))
        alone = bundle[0] if len(bundle) == 1 else None
        in_slices = alone is not None and self._can_slice(alone)
        if alone is not None and in_slices and self._bytes_of(alone) > self._bundle_bytes:
            self._sliced = SlicedParameter(self._optimizer, alone, self._engine)
        elif self._advanced(step, bundle, divisible=alone is None or in_slices):
            del self._left[: len(bundle)]

    def _can_slice(self, slot: Slot) -> bool:
        """Whether a parameter may be stepped in slices, and is large enough that they are worth their launches."""
        if not self._may_slice or self._bytes_of(slot) <= min(self._bundle_bytes, SMALLEST_BUNDLE_BYTES):
            return False
        return is_sliceable(self._optimizer, slot, self._engine)

    def _advance_slice(self, step: OpenStep, sliced: SlicedParameter) -> None:
        try:
            part = self._twice(lambda: sliced.show(self._bundle_bytes), "before a slice")
            self._advanced(step, [part], divisible=self._bytes_of(part) > SMALLEST_BUNDLE_BYTES)
        finally:
            sliced.hide()
        if sliced.done:
            self._sliced = None
            del self._left[0]

    def _advanced(self, step: OpenStep, bundle: list[Slot], *, divisible: bool) -> bool:
        """Step a bucket; on failure, halve the bucket size and return False if divisible, else try it again."""
        failure = self._attempt(step, bundle, on_host=False)
        if failure is not None and divisible:
            self._bundle_bytes = sum(map(self._bytes_of, bundle)) // 2
            return False
        for _ in range(2):  # these keep the copies in host memory
            if failure is not None:
                failure = self._attempt(step, bundle, on_host=True)
        if failure is not None:
            raise self._error(failure, self._name_of(bundle[0]))
        return True

    def _attempt(self, step: OpenStep, bundle: list[Slot], *, on_host: bool) -> str | None:
        """Step a bucket; on failure everything is restored, and the reason is returned."""

        def copies() -> StepCopies:
            return StepCopies(
                self._optimizer,
                bundle,
                on_host=on_host,
                room=self._room,
                reads_gradient=self._reads_gradient,
            )

        def act() -> None:
            step.advance(bundle)
            if self._sliced is not None:
                self._sliced.keep()

        return self._counted(tried_on_copies(copies, act, lambda: step.take_back(bundle)))

    def _counted(self, failure: str | None) -> str | None:
        if failure is not None:
            self.failures += 1
            self._room = Room()
        return failure

    def _bytes_of(self, slot: Slot) -> int:
        return bytes_to_copy(self._optimizer, slot.parameter)

    def _reads_gradient(self, slot: Slot) -> bool:
        """Whether a step is known to leave the gradient unchanged; some overwrite or unscale it."""
        gradient = slot.parameter.grad
        if self._engine.shadows(slot.parameter):
            # The shadow has its own copy of the gradient.
            return gradient is not None and gradient.dtype != torch.float32
        fused = self._optimizer.param_groups[slot.group].get("fused")
        return type(self._optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not fused

    def _name_of(self, slot: Slot) -> str:
        sliced, part = self._sliced, slot.parameter
        if sliced is None:
            return f"for parameter {slot.index} of shape {tuple(part.shape)} alone"
        elements = f"{part.numel()} elements from element {sliced.start}"
        return f"for {elements} of parameter {slot.index} of shape {tuple(sliced.slot.parameter.shape)} alone"

    def _error(self, failure: str, where: str) -> StepOutOfMemoryError:
        stepped = self._count - len(self._left)
        half_way = self._sliced is not None and self._sliced.start > 0
        state = "Weights, states and gradients are as before the step."
        if stepped or half_way:
            state = (
                f"{stepped} of {self._count} parameters have been stepped{', one in part,' * half_way} and the others "
                "not: the weights are of half a step; go on from a checkpoint."
            )
        return step_error(self._optimizer, failure, where, state, half_stepped=stepped > 0 or half_way)


def show_overrides(optimizer: Any) -> None:
    """Make bitsandbytes look up overrides for all parameters; its first step would see those of a bucket only."""
    if is_bitsandbytes(optimizer) and not optimizer.initialized:
        optimizer.check_overrides()

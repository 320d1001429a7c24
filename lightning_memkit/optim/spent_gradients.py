"""What a step within backward has used: code that runs before `optimizer.step()` must not use it again in silence.

Such code finds no gradient, so clipping and scaling do nothing and norms are 0; and a weight that it changes
has been stepped already. Where such code may run, stand-ins take the gradients' places.
"""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True)
class GradientReader:
    """Code that may use released gradients: its name, and what to write instead."""

    name: str
    remedy: str


class SpentGradient(Tensor):
    """Stands in ``.grad`` for a gradient that was used and dropped: it has no storage, and any use is an error.

    It may be replaced by None, as `zero_grad` does. Setting it to zero is noted, and its metadata may be read.
    """

    reader: GradientReader
    of_shape: tuple[int, ...]
    is_zeroed: bool

    @staticmethod
    def __new__(cls, parameter: Parameter, reader: GradientReader) -> "SpentGradient":
        """A stand-in of a parameter's gradient."""
        made = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            parameter.shape,
            dtype=getattr(parameter, "grad_dtype", None) or parameter.dtype,
            device=parameter.device,
        )
        made.reader, made.of_shape, made.is_zeroed = reader, tuple(parameter.shape), False
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})
        found = list(_spent_among((*args, *(kwargs or {}).values())))
        if func in _ZEROING:
            for spent in found:
                spent.is_zeroed = True
            return None
        spent = found[0]
        raise RuntimeError(
            f"{spent.reader.name} uses the gradient of a parameter of shape {spent.of_shape}, which was used and "
            f"dropped within backward: {spent.reader.remedy}, or don't release gradients."
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Uses in Python end above: this is autograd, which adds a gradient to the one that it finds.
        raise second_gradient_error(next(_spent_among(args)).of_shape)


# What `zero_grad(set_to_none=False)` asks, and does.
_METADATA = frozenset(
    [getattr(Tensor, name).__get__ for name in ("device", "dtype", "grad_fn", "is_sparse", "shape")]
    + [Tensor.requires_grad_]
)
_ZEROING = frozenset([Tensor.zero_, torch._foreach_zero_])


def second_gradient_error(shape: Iterable[int]) -> RuntimeError:
    """The error for a parameter that gets a second gradient in one step: released gradients can't accumulate."""
    return RuntimeError(
        f"A parameter of shape {tuple(shape)} gets a second gradient in one step, after the first "
        "was used and dropped: released gradients can't accumulate. Call optimizer.step() after every "
        "backward (accumulate_grad_batches=1, one micro-batch a step), or don't release gradients. After an "
        "error within a backward, load a checkpoint: part of the weights are stepped."
    )


class SpentGradients:
    """The parameters that a release has stepped, until their gradients would have been zeroed.

    Attributes:
        reader: while set, dropped gradients leave stand-ins that name it.
        between: names of code that runs between backward and the step, for errors.
    """

    def __init__(self) -> None:
        self.reader: GradientReader | None = None
        self.between = ""
        self._stepped: list[Parameter] = []
        self._versions: list[int] = []  # that their steps left
        self._previous: list[Parameter] = []  # those of the last whole step
        self._with_stand_in: list[Parameter] = []
        self._zeros: list[Parameter] = []  # whose gradients would be zero now, and not None

    def drop(self, parameters: list[Parameter]) -> None:
        """Free these parameters' gradients."""
        if self.reader is not None:
            self._place(parameters, self.reader)
            return
        for parameter in parameters:
            parameter.grad = None

    def note(self, parameters: list[Parameter]) -> None:
        """Remember that these were stepped, each for the first time in this step, and as what."""
        self._stepped += parameters
        self._versions += [parameter._version for parameter in parameters]

    def place(self, reader: GradientReader) -> None:
        """Leave stand-ins for the gradients of this step: `reader` runs next."""
        self._place(self._stepped, reader)

    def remove(self) -> None:
        """Remove all stand-ins."""
        for parameter in self._with_stand_in:
            if isinstance(parameter.grad, SpentGradient):
                parameter.grad = None
        self._with_stand_in = []

    def refuse_changed(self) -> None:
        """Refuse weights that were changed in place after their step, where it would have come before.

        Raises:
            RuntimeError: giving the first one's shape. Changes through ``.data`` are not noticed.
        """
        versions = [parameter._version for parameter in self._stepped]
        if versions == self._versions:
            return
        for parameter, version, noted in zip(self._stepped, versions, self._versions, strict=True):
            if version != noted:
                by = f" ({self.between} may have done so)" if self.between else ""
                raise RuntimeError(
                    f"A parameter of shape {tuple(parameter.shape)} was changed between backward and step(){by}, but "
                    "a released gradient is used within backward: the change came after the step. Change weights "
                    "before the forward or after step(), or don't release gradients."
                )

    def end_step(self) -> None:
        """A step is done: without release, its gradients would be alive until they are zeroed."""
        self._previous, self._stepped, self._versions = self._stepped or self._previous, [], []

    def forget_step(self) -> None:
        """The step under way is dropped."""
        self._stepped, self._versions, self._zeros = [], [], []
        self.remove()

    def zeroed(self) -> None:
        """Gradients are zeroed here: those of the step before would not be alive any longer."""
        self._previous = []

    def expect_zeroing(self, zeroes: GradientReader, optimized: Container[int]) -> None:
        """Leave stand-ins that `zeroes`, which runs next, has to remove.

        Args:
            zeroes: code of the user's that may do otherwise.
            optimized: ids of the parameters that the optimizer has.
        """
        self._place([parameter for parameter in self._previous if id(parameter) in optimized], zeroes)

    def refuse_unzeroed(self) -> None:
        """Refuse to go on if a stand-in was not removed.

        Raises:
            RuntimeError: the gradients would accumulate, naming what left them.
        """
        found = [(p, p.grad) for p in self._with_stand_in if isinstance(p.grad, SpentGradient)]
        self.remove()
        self._zeros = [parameter for parameter, spent in found if spent.is_zeroed]
        left = [spent for _, spent in found if not spent.is_zeroed]
        if left:
            raise RuntimeError(
                f"{left[0].reader.name} left the gradients of {len(left)} parameters, to which the next ones would be "
                f"added, but they were used and dropped: {left[0].reader.remedy}, or don't release gradients."
            )
        self.zeroed()

    def refuse_zeros(self) -> None:
        """Refuse to pass over parameters that a step without release would step with a gradient of zero.

        Raises:
            RuntimeError: their gradients were set to zero instead of None, and backward gave them none.
        """
        stepped = set(map(id, self._stepped)) if self._zeros else ()
        unused = [p for p in self._zeros if p.grad is None and id(p) not in stepped]
        self._zeros = []
        if unused:
            raise RuntimeError(
                f"{len(unused)} parameters got no gradient, and theirs were set to zero before, with which they would "
                "be stepped; with released gradients write optimizer.zero_grad(set_to_none=True)."
            )

    def refuse_repeat(self, stepper: str) -> None:
        """Refuse a step without a new gradient, which would use those of the step before once more.

        Raises:
            RuntimeError: gradients were not zeroed since, and none was computed.
        """
        if self._previous and not self._stepped:
            raise RuntimeError(
                f"{stepper} steps again without a backward or zero_grad() since the last step, whose gradients were "
                "used and dropped; step once for each backward, or don't release gradients."
            )

    def _place(self, parameters: list[Parameter], reader: GradientReader) -> None:
        for parameter in parameters:
            parameter.grad = SpentGradient(parameter, reader)
        self._with_stand_in += parameters


def _spent_among(values: Iterable[Any]) -> Iterator[SpentGradient]:
    for value in values:
        if isinstance(value, SpentGradient):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _spent_among(value)

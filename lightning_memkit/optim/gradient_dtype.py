"""Gradients of another dtype than their weights: where torch allows them, and how they are set."""

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

GradDtype = Literal["auto", "float32", "bfloat16"]


class GradientDtype:
    """The dtype of bfloat16 weights' gradients: float32 if several passes accumulate, or if asked for.

    Args:
        wanted: ``"auto"``, or one dtype.
    """

    def __init__(self, wanted: GradDtype) -> None:
        self._wanted: GradDtype = wanted
        self._least_parts = self._parts = 1
        self._is_float32 = False
        self._why_not: str | None = None
        self._has_warned = False
        self._accumulates = False  # seen to, in a way that no setting tells of

    @property
    def is_undecided(self) -> bool:
        """Whether a pass that adds to gradients of an earlier one would change anything."""
        said = self._why_not is not None and self._has_warned
        return self._wanted == "auto" and not self._is_float32 and not said

    def begin(self, *, least_parts: int, why_not: str | None) -> None:
        """Start a fit.

        Args:
            least_parts: the least number of backward passes that accumulate to a step, whatever `set_parts`
                says.
            why_not: why float32 gradients are impossible here; None if they are possible.
        """
        self._least_parts, self._why_not, self._has_warned = least_parts, why_not, False
        self._accumulates = False

    def set_parts(
        self, parts: int, parameters: Callable[[], Iterable[nn.Parameter]], warn: Callable[[str], None]
    ) -> None:
        """Set how many backward passes accumulate to a step; existing gradients are converted.

        Raises:
            ValueError: float32 was asked for explicitly and is impossible; under ``"auto"`` this is a
                warning.
        """
        self._parts = parts = max(parts, self._least_parts)
        wanted = self._wanted == "float32" or (self._wanted == "auto" and parts > 1)
        if wanted != self._is_float32 and self._is_possible(warn):
            for parameter in parameters():
                set_grad_dtype(parameter, torch.float32 if wanted else parameter.dtype)
            self._is_float32 = wanted

    def see_accumulation(
        self, parameters: Callable[[], Iterable[nn.Parameter]], warn: Callable[[str], None]
    ) -> None:
        """Accumulate in float32 from now to the fit's end, since a backward pass adds to gradients that were kept."""
        if self.is_undecided:
            self._accumulates, self._least_parts = True, max(2, self._least_parts)
            self.set_parts(self._parts, parameters, warn)

    def give_back(self, parameters: Iterable[nn.Parameter]) -> None:
        """Restore gradients of the weights' dtype."""
        self._is_float32 = False
        for parameter in parameters:
            set_grad_dtype(parameter, parameter.dtype)

    def _passes(self) -> str:
        return "several backward passes" if self._accumulates else f"{self._parts} micro-batches"

    def _is_possible(self, warn: Callable[[str], None]) -> bool:
        if self._why_not is None:
            return True
        if self._wanted == "float32":
            raise ValueError(
                f"grad_dtype='float32' is not possible: {self._why_not}; write grad_dtype='bfloat16'."
            )
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"The gradients of {self._passes()} add up in bfloat16, where small gradients get lost, "
                f"since {self._why_not}. Write grad_dtype='bfloat16' to accept that."
            )
        return False


def why_no_float32_gradients(model: nn.Module, *, averaged_late: bool) -> str | None:
    """The reason why gradients of bfloat16 weights can't be float32 here, or None.

    Args:
        model: the module as it is trained, wrapped or sharded.
        averaged_late: gradients under DDP are averaged after the backward, and not by DDP itself.
    """
    if not hasattr(Tensor, "grad_dtype"):
        return f"torch {torch.__version__} lacks Tensor.grad_dtype"
    if isinstance(model, DistributedDataParallel) and not averaged_late:
        return "DistributedDataParallel reduces gradients of the weights' dtype only"
    if any(hasattr(parameter, "placements") for parameter in model.parameters()):
        return "FSDP2 gives gradients of the weights' dtype only"
    return None


def set_grad_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Set the dtype of a parameter's gradients, and cast the existing one."""
    gradient, parameter.grad = parameter.grad, None
    parameter.grad_dtype = dtype
    if gradient is not None:
        parameter.grad = gradient.to(dtype)


def full_precision_reductions() -> Callable[[], None]:
    """Make CUDA's bfloat16 matmuls accumulate in float32 throughout; returns the undo."""
    flags = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction
    flags.allow_bf16_reduced_precision_reduction = False

    def undo() -> None:
        flags.allow_bf16_reduced_precision_reduction = before

    return undo

"""Tells rounding from a difference between a batch's loss and the sum of those of its micro-batches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_memkit.micro_batching import batch_size
from lightning_memkit.micro_batching.run import Step

# Of the loss, by its dtype: forwards of other shapes round otherwise, on a GPU in TF32.
_ROUNDED = {torch.float64: 1e-6, torch.float32: 1e-3}
# The same where the model, or its loss, computes in few bits: of eight rows; of more it averages out, to the second.
_ROUNDED_IN_FEW_BITS = 2e-2, 4e-3
# Besides: a loss whose rows cancel (advantages whose mean is zero) is all rounding.
_CANCELLED = {torch.float64: 1e-9, torch.float32: 1e-5}
_CANCELLED_IN_FEW_BITS = 1e-2


def difference(step: Step, whole: Tensor, ours: Tensor, summands: Sequence[Tensor]) -> float:
    """How far two losses of a batch are apart, relative to their size; 0 where rounding explains it, or for nan.

    Args:
        step: the batch's step.
        whole: the loss of the whole batch.
        ours: the sum of the summands.
        summands: the losses of micro-batches, weighted; they may cancel.
    """
    losses = torch.stack([one.double().reshape(()).to(whole.device) for one in (whole, ours, *summands)])
    theirs, own, *others = losses.tolist()
    size = max(abs(theirs), abs(own), sum(map(abs, others)))
    relative, absolute = _allowed(step, whole)
    is_apart = abs(theirs - own) > relative * size + absolute and size < float("inf")
    return abs(theirs - own) / size if is_apart else 0.0


def is_exact(step: Step) -> bool:
    """Whether a model computes in float32 or float64, as far as its precision and its weights say."""
    weights = {parameter.dtype for parameter in step.run.module.parameters() if parameter.is_floating_point()}
    return step.run.precision in ("32-true", "64-true") and weights <= _ROUNDED.keys()


def allowed_of_numbers(step: Step, whole: Tensor) -> float | None:
    """The relative error that rounding explains in a number beside the loss; None if it may be any.

    One row that is right by a last bit changes an accuracy by more than rounding: rows round alike on a CPU only.
    """
    if not is_exact(step) or whole.device.type != "cpu":
        return None
    return _ROUNDED.get(whole.dtype)


def allowed_of_rows(step: Step, whole: Tensor) -> float:
    """The relative error, by norm, that rounding explains in a tensor of rows."""
    return 10 * (_ROUNDED.get(whole.dtype, 1e-2) if is_exact(step) else _ROUNDED_IN_FEW_BITS[0])


def _allowed(step: Step, whole: Tensor) -> tuple[float, float]:
    """The difference that rounding explains: relative to the loss, and besides."""
    if is_exact(step) and whole.dtype in _ROUNDED:
        return _ROUNDED[whole.dtype], _CANCELLED[whole.dtype]
    most, least = _ROUNDED_IN_FEW_BITS
    if bool(whole == whole.bfloat16()):  # the loss itself was rounded
        return most, _CANCELLED_IN_FEW_BITS
    return max(least, most * (8 / max(batch_size(step.batch), 8)) ** 0.5), _CANCELLED_IN_FEW_BITS

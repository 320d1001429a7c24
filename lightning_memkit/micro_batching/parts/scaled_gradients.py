"""Scale what a step has added to gradients, once its batch is known."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def scale(parameters: Iterable[Tensor], factor: float, before: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
    """Multiply what the step has added to the gradients of before."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if factor != 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)
        for leaf, own in before:
            if leaf.grad is not None and any(leaf.grad is gradient for gradient in gradients):
                leaf.grad.add_(own, alpha=1.0 - factor)

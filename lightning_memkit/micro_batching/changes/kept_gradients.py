"""Gradients that are there before a step and that it adds to: set aside for a trial, restored for a retry."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_memkit.micro_batching.run import Step

_MOST_BYTES = 2**26  # of gradients of tensors in no optimizer that are copied in every step
_NOT_COPIED = (
    "A step is repeated, and the gradients of tensors in no optimizer ({count} tensors, {size} MiB), which add up "
    "over steps, are too many to be copied in each: they begin anew. Freeze these tensors (requires_grad_(False)) if "
    "nothing reads their gradients, or set them to None in optimizer_zero_grad."
)


def outliving(step: Step, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The tensors whose gradients the step adds to those of earlier steps, as no zero_grad sets them to zero.

    Args:
        step: the first of its accumulation window.
        leaves: the tensors that get gradients.
    """
    zeroed = set(map(id, _of_optimizer(step))) if step.run.zeroes_gradients(step.optimizer) else set[int]()
    return [leaf for leaf in leaves if id(leaf) not in zeroed]


def in_no_optimizer(step: Step, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that the step's optimizer does not step."""
    stepped = set(map(id, _of_optimizer(step)))
    return [leaf for leaf in leaves if id(leaf) not in stepped]


def _of_optimizer(step: Step) -> Iterator[Tensor]:
    for group in step.optimizer.param_groups:
        yield from group["params"]


@contextmanager
def set_aside(leaves: Sequence[Tensor], kept: Sequence[Tensor]) -> Iterator[None]:
    """A context in which tensors have no gradients; after it `kept` have those of before, and others none."""
    before = [(leaf, leaf.grad) for leaf in kept]
    _clear(leaves)
    try:
        yield
    finally:
        _clear(leaves)
        for leaf, gradient in before:
            _give(leaf, gradient)


def _give(leaf: Tensor, gradient: Tensor | None) -> None:
    """Give a gradient back, in the dtype that gradients have by now: a precision may have widened them meanwhile."""
    dtype = getattr(leaf, "grad_dtype", None)
    leaf.grad = gradient if gradient is None or dtype is None else gradient.to(dtype)


def _clear(leaves: Sequence[Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None


class KeptGradients:
    """Copies of the gradients that outlive a step, in host memory if they are on an accelerator.

    Args:
        step: the first of its accumulation window.
        leaves: the tensors that get gradients.
    """

    def __init__(self, step: Step, leaves: Sequence[Tensor]) -> None:
        self._leaves = leaves
        kept = [leaf for leaf in outliving(step, leaves) if leaf.grad is not None]
        beside = in_no_optimizer(step, kept)
        self._lost_bytes = sum(leaf.grad.nbytes for leaf in beside if leaf.grad is not None)
        self._lost = beside if self._lost_bytes > _MOST_BYTES else []
        lost = set(map(id, self._lost))
        self._kept = [(leaf, leaf.grad, _copy(leaf.grad)) for leaf in kept if id(leaf) not in lost]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore these gradients; all other tensors have none."""
        _clear(self._leaves)
        for leaf, gradient, values in self._kept:
            if gradient is not None and values is not None:
                gradient.copy_(values)
                _give(leaf, gradient)
        if self._lost:
            size = self._lost_bytes // 2**20
            warnings.warn(_NOT_COPIED.format(count=len(self._lost), size=size), stacklevel=2)


def _copy(gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    detached = gradient.detach()
    return detached.clone() if detached.device.type == "cpu" else detached.to("cpu", copy=True)

"""Autograd's view of a call in chunks: one node, in whose backward each chunk runs again with gradient."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_memkit.activations.chunks.axes import ChunkError
from lightning_memkit.activations.chunks.call import ChunkedCall
from lightning_memkit.activations.chunks.leaves import leaves_behind
from lightning_memkit.activations.chunks.outputs import JoinedOutputs, OutputPlace

_SUMMED_IN_FLOAT32 = (torch.bfloat16, torch.float16)


class ChunkedFunction(torch.autograd.Function):
    """Runs the chunks without gradient, and in the backward again, one at a time; gives parameters one gradient."""

    @staticmethod
    def forward(ctx: Any, call: ChunkedCall, places: Sequence[OutputPlace], *tensors: Tensor) -> Any:
        """The tensors are the call's arguments, then its parameters."""
        ctx.set_materialize_grads(False)
        ctx.call, ctx.places = call, places
        given, ctx.parameters = tensors[: len(call.indices)], tensors[len(call.indices) :]
        outputs = call.outputs(JoinedOutputs(places, call.axes), given)
        # Not saved with the arguments: activation checkpointing around would hand back others in their place.
        ctx.versions = [one._version for one in ctx.parameters]
        ctx.save_for_backward(*given)
        constant = (one for one, place in zip(outputs, places, strict=True) if not place.is_differentiable)
        ctx.mark_non_differentiable(*constant)
        call.let_go()
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """The gradients of arguments and parameters, each once for all chunks."""
        if torch.is_grad_enabled():  # torch's own guard lets a gradient penalty through, without its gradient
            raise ChunkError(
                "A module in chunks has no second derivative (create_graph=True, as for gradient penalties). Take it "
                "through a module that doesn't run in chunks."
            )
        call: ChunkedCall = ctx.call
        _refuse_written(ctx.parameters, ctx.versions)
        tensors, needed = (*ctx.saved_tensors, *ctx.parameters), ctx.needs_input_grad[2:]
        splits = [call.splits(number) for number in range(len(call.indices))]
        splits += [0] * (len(tensors) - len(splits))  # parameters
        sums = [
            GradientSum(tensor, count > 0, is_only=count == len(call.axes))
            for tensor, count in zip(tensors, splits, strict=True)
        ]
        for number, chunk in enumerate(call.chunks):
            of_chunk = [
                place.narrowed(grad, chunk) if grad is not None and place.is_of(chunk) else None
                for place, grad in zip(ctx.places, grads, strict=True)
            ]
            for index, grad in _gradients(call, number, tensors, needed, of_chunk):
                sums[index].add(
                    grad, lambda whole, index=index, chunk=chunk: call.narrowed(index, whole, chunk)
                )
        return None, None, *(one.total if wanted else None for one, wanted in zip(sums, needed, strict=True))


def _gradients(
    call: ChunkedCall,
    number: int,
    tensors: Sequence[Tensor],
    needed: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> Iterator[tuple[int, Tensor]]:
    """The index and gradient of each tensor that one chunk's outputs depend on."""
    if all(grad is None for grad in grads):
        return
    given = call.given(call.chunks[number], tensors[: len(call.indices)])
    with call.again(number):
        for one, wanted in zip(given, needed, strict=False):
            one.requires_grad_(wanted)
        outputs = [one for one in tree_leaves(call.run(given)) if isinstance(one, Tensor)]
    pairs = [
        (one, grad)
        for one, grad in zip(outputs, grads, strict=True)
        if grad is not None and one.requires_grad
    ]
    if not pairs:
        return
    sources = [*given, *tensors[len(given) :]]
    if number == 0:
        _refuse_others(leaves_behind([one for one, _ in pairs]), sources)
    wanted = [index for index, is_needed in enumerate(needed) if is_needed]
    roots, cotangents = zip(*pairs, strict=True)
    found = torch.autograd.grad(roots, [sources[index] for index in wanted], cotangents, allow_unused=True)
    yield from ((index, grad) for index, grad in zip(wanted, found, strict=True) if grad is not None)


def _refuse_written(parameters: Sequence[Tensor], versions: Sequence[int]) -> None:
    for parameter, version in zip(parameters, versions, strict=True):
        if parameter._version != version:
            raise RuntimeError(
                f"A weight of shape {tuple(parameter.shape)} of a module in chunks was modified by an inplace "
                "operation between its forward and its backward, which runs it again; step after the backward."
            )


def _refuse_others(leaves: Sequence[Tensor], known: Sequence[Tensor]) -> None:
    """Refuse a gradient that would be lost: autograd was told of these tensors only."""
    ids = {id(one) for one in known}
    for leaf in leaves:
        if id(leaf) not in ids:
            raise ChunkError(
                f"A module in chunks reads a tensor of shape {tuple(leaf.shape)} that needs a gradient, and that it "
                "did not read when it was checked. Hand it to the module as an argument, or make it a parameter of it."
            )


class GradientSum:
    """The gradient of one tensor over chunks; in float32 where the tensor's own dtype would lose small terms.

    Args:
        like: the tensor.
        is_split: whether a chunk has rows or tokens of it; if not, all of it.
        is_only: whether no two chunks have the same of it.
    """

    def __init__(self, like: Tensor, is_split: bool, *, is_only: bool) -> None:
        self.total: Tensor | None = None
        self._dtype = torch.float32 if like.dtype in _SUMMED_IN_FLOAT32 else like.dtype
        self._like, self._is_split, self._is_only = like, is_split, is_only
        self._is_own = False

    def add(self, grad: Tensor, narrowed: Callable[[Tensor], Tensor]) -> None:
        """Add the gradient of one chunk."""
        if self._is_split:
            if self.total is None:
                self.total = torch.zeros_like(self._like, dtype=grad.dtype if self._is_only else self._dtype)
            if self._is_only:
                narrowed(self.total).copy_(grad)
            else:
                narrowed(self.total).add_(grad)
        elif self.total is None:
            self.total = grad
        elif self._is_own and not grad.is_sparse:
            self.total += grad
        else:
            # Autograd may hand out one tensor twice: what it gave first is not written to.
            self.total = self.total.to(self._dtype) + grad
            self._is_own = True

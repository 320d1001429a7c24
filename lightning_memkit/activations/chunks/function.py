"""Autograd's view of a call in chunks: two nodes, in whose backward each chunk runs again with gradient."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_memkit.activations.chunks.axes import ChunkError, as_dense
from lightning_memkit.activations.chunks.call import ChunkedCall
from lightning_memkit.activations.chunks.gradient_sums import without_hooks
from lightning_memkit.activations.chunks.leaves import leaves_behind
from lightning_memkit.activations.chunks.outputs import JoinedOutputs, OutputPlace

_SUMMED_IN_FLOAT32 = (torch.bfloat16, torch.float16)


class ChunkedArguments(torch.autograd.Function):
    """Saves the arguments of a call, and gives their gradients; its output leads there from the call's outputs.

    A node of its own, made before the chunks run: activation checkpointing around stops its recomputation at the last
    tensor that was saved, and so doesn't run the chunks of a block's last module once more than they need.
    """

    @staticmethod
    def forward(ctx: Any, call: ChunkedCall, *tensors: Tensor) -> Tensor:
        """The tensors are the call's arguments, then its parameters."""
        ctx.call, ctx.parameters = call, tensors[len(call.indices) :]
        # Not saved with the arguments: activation checkpointing around would hand back others in their place.
        ctx.versions = [one._version for one in ctx.parameters]
        ctx.kinds = [(one.shape, one.dtype) for one in tensors]
        ctx.save_for_backward(*call.take_kept())
        # Autograd runs this node's backward on the device and stream of what it gave.
        return next((one for one in tensors if one.requires_grad), tensors[0]).new_empty(
            0, dtype=torch.float32
        )

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        """The gradients of arguments and parameters, each once for all chunks, each of which runs again."""
        call: ChunkedCall = ctx.call
        places, grads = call.take_gradients()
        _refuse_written(ctx.parameters, ctx.versions)
        kept, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        splits = [call.splits(number) for number in range(len(call.indices))]
        splits += [0] * len(ctx.parameters)
        sums = [
            GradientSum(shape if count else None, dtype, is_only=count == len(call.axes))
            for (shape, dtype), count in zip(ctx.kinds, splits, strict=True)
        ]
        for number, chunk in call.numbered():
            of_chunk = [
                as_dense(place.narrowed(grad, chunk), grad)
                if grad is not None and place.is_of(chunk)
                else None
                for place, grad in zip(places, grads, strict=True)
            ]
            for index, grad in _gradients(call, number, (kept, ctx.parameters), needed, of_chunk):
                sums[index].add(
                    grad, lambda whole, index=index, chunk=chunk: call.narrowed(index, whole, chunk)
                )
        return None, *(one.total if wanted else None for one, wanted in zip(sums, needed, strict=True))


class ChunkedOutputs(torch.autograd.Function):
    """Runs the chunks without gradient; hands the outputs' gradients on to the arguments' node."""

    @staticmethod
    def forward(ctx: Any, call: ChunkedCall, places: Sequence[OutputPlace], arguments: Tensor) -> Any:
        """`arguments` is the output of the arguments' node."""
        ctx.set_materialize_grads(False)
        ctx.call, ctx.places = call, places
        outputs = call.outputs(JoinedOutputs(places, call.axes))
        constant = (one for one, place in zip(outputs, places, strict=True) if not place.is_differentiable)
        ctx.mark_non_differentiable(*constant)
        ctx.empty = arguments.detach()
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Nothing but the way to the arguments' node."""
        if torch.is_grad_enabled():  # torch's own guard lets a gradient penalty through, without its gradient
            raise ChunkError(
                "A module in chunks has no second derivative (create_graph=True, as for gradient penalties). Take it "
                "through a module that doesn't run in chunks."
            )
        ctx.call.give_gradients(ctx.places, grads)
        return None, None, ctx.empty


def _gradients(
    call: ChunkedCall,
    number: int,
    tensors: tuple[Sequence[Tensor], Sequence[Tensor]],
    needed: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> Iterator[tuple[int, Tensor]]:
    """The index and gradient of each tensor that one chunk's outputs depend on; of what was kept, and parameters."""
    if all(grad is None for grad in grads):
        return
    kept, parameters = tensors
    given = call.given_again(number, kept)
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
    sources = [*given, *parameters]
    if number == 0:
        _refuse_others(leaves_behind([one for one, _ in pairs]), sources)
    wanted = [index for index, is_needed in enumerate(needed) if is_needed]
    roots, cotangents = zip(*pairs, strict=True)
    with without_hooks(parameters):
        found = torch.autograd.grad(
            roots, [sources[index] for index in wanted], cotangents, allow_unused=True
        )
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
        shape: of a tensor of which a chunk has some rows or tokens; None for one that every chunk gets whole.
        dtype: of the tensor.
        is_only: whether no two chunks have the same of it.
    """

    def __init__(self, shape: torch.Size | None, dtype: torch.dtype, *, is_only: bool) -> None:
        self.total: Tensor | None = None
        self._dtype = torch.float32 if dtype in _SUMMED_IN_FLOAT32 else dtype
        self._shape, self._is_only = shape, is_only
        self._is_own = False

    def add(self, grad: Tensor, narrowed: Callable[[Tensor], Tensor]) -> None:
        """Add the gradient of one chunk."""
        if self._shape is not None:
            if self.total is None:
                self.total = grad.new_zeros(self._shape, dtype=grad.dtype if self._is_only else self._dtype)
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

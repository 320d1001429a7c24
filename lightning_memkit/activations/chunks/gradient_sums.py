"""Asks a module whether gradients add up over its rows or tokens, as they do chunk by chunk."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lightning_memkit.activations.chunks.axes import ChunkAxis, ChunkError, Ranges
from lightning_memkit.activations.chunks.call import ChunkedCall
from lightning_memkit.activations.chunks.differences import MORE_BITS, ROUNDING, allowed, difference
from lightning_memkit.activations.chunks.module_state import wider_dtypes
from lightning_memkit.activations.chunks.outputs import OutputPlace

_STRETCH = 1 << 12


@contextmanager
def without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Run the body without the hooks of leaves: they are for the whole gradient, and run when that is there."""
    tables = [(table, dict(table)) for one in tensors if (table := one._backward_hooks)]
    for table, _ in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in tables:
            table.update(hooks)


class GradientSums:
    """Compares the gradients of a call with the sums of those of its halves.

    Args:
        module: what is called.
        call: a few rows and tokens.
        places: where the outputs have them.
        needs: which of the call's tensors need gradients.
        outside: parameters that the module reads and that are not its own.
    """

    def __init__(
        self,
        module: nn.Module,
        call: ChunkedCall,
        places: Sequence[OutputPlace],
        needs: Sequence[bool],
        outside: Sequence[Tensor],
    ) -> None:
        self._module, self._call, self._places, self._needs = module, call, places, needs
        self._outside = outside

    def check(self, axis: ChunkAxis, tensors: Sequence[Tensor]) -> None:
        """Refuse a module whose gradients don't add up along an axis.

        Args:
            axis: of the call.
            tensors: arguments, two of whose rows or tokens are alike: what counts them tells.

        Raises:
            ChunkError: they don't.
        """
        try:
            if self._off(axis, tensors, {}) <= 1:
                return
            trained = {name for name, one in self._module.named_parameters() if one.requires_grad}
            with wider_dtypes(self._module) as widened:  # rounding, perhaps
                for name, one in self._module.named_parameters():
                    one.requires_grad_(name in trained)
                # Those that are zero but for rounding are held against the largest of all.
                off = self._off(axis, [widened(one) for one in tensors], MORE_BITS)
        except torch.OutOfMemoryError:
            raise
        # Whatever a module raises in the backward of fewer rows than it is made for.
        except Exception as error:
            raise ChunkError(
                f"The backward of {type(self._module).__name__} fails on fewer {axis.name}: {error!r}. Run the "
                "modules within it in chunks that take any number."
            ) from error
        if off > 1:
            raise ChunkError(
                f"{type(self._module).__name__} can't run in chunks of {axis.name}: its gradients are not the sum of "
                f"those of its {axis.name}, as with an embedding that scales gradients by frequency, or hooks that "
                "clip them. Leave out of the chunked module what needs the gradient of all of them."
            )

    def _off(self, axis: ChunkAxis, tensors: Sequence[Tensor], of_all: dict[torch.dtype, float]) -> float:
        """By how many times what rounding may do the sums of two halves miss the whole."""
        axes = self._call.axes
        everything: Ranges = tuple((0, one.count) for one in axes)
        whole = self._gradients(everything, tensors)
        sums: list[Tensor | None] = [None] * len(whole)
        for half in axis.halves():
            ranges = tuple(half if one is axis else (0, one.count) for one in axes)
            for number, grad in enumerate(self._gradients(ranges, tensors)):
                if grad is None:
                    continue
                if number < len(tensors) and axis.dims[self._call.indices[number]] is not None:
                    placed = torch.zeros_like(tensors[number], dtype=grad.dtype)
                    self._call.narrowed(number, placed, ranges).copy_(grad)
                    grad = placed
                known = sums[number]
                sums[number] = grad if known is None else known + grad
        pairs = [
            (_or_zeros(one, other), _or_zeros(other, one))
            for one, other in zip(whole, sums, strict=True)
            if one is not None or other is not None
        ]
        largest = max((float(one.abs().max()) for one, _ in pairs if one.numel()), default=0.0)
        worst = 0.0
        for one, other in pairs:
            if off := difference(one, other):
                most = max(allowed(one, ROUNDING), of_all.get(one.dtype, 0.0) * largest, 1e-300)
                worst = max(worst, off / most)
        return worst

    def _gradients(self, ranges: Ranges, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """Those of the call's tensors, then digests of the parameters', for outputs weighed by random numbers."""
        parameters = [one for one in (*self._module.parameters(), *self._outside) if one.requires_grad]
        given = self._call.given(ranges, tensors)
        for one, need in zip(given, self._needs, strict=True):
            one.requires_grad_(need)
        # Not the tensor itself: an output that its own node keeps as a Python object would never be freed.
        kept = saved_tensors_hooks(Tensor.detach, lambda one: one)
        with torch.enable_grad(), kept, without_hooks(parameters):
            outputs = [one for one in tree_leaves(self._call.run(given)) if isinstance(one, Tensor)]
            pairs = [
                (one, self._weights(number, place, one, ranges))
                for number, (one, place) in enumerate(zip(outputs, self._places, strict=True))
                if one.requires_grad and place.is_of(ranges)
            ]
            sources = [one for one in (*given, *parameters) if one.requires_grad]
            if not pairs or not sources:
                return [None] * (len(given) + len(parameters))
            roots, cotangents = zip(*pairs, strict=True)
            found = iter(torch.autograd.grad(roots, sources, cotangents, allow_unused=True))
        of_given = [next(found) if one.requires_grad else None for one in given]
        return [*of_given, *(None if grad is None else _digest(grad) for grad in found)]

    def _weights(self, number: int, place: OutputPlace, like: Tensor, ranges: Ranges) -> Tensor:
        """Random numbers for an output of some of the rows and tokens, as the whole output's have there."""
        shape = list(like.shape)
        for dim, ratio, axis in zip(place.dims, place.ratios, self._call.axes, strict=True):
            if dim is not None:
                shape[dim] = axis.count * ratio
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        return place.narrowed(whole, ranges).to(like.device, like.dtype)


def _or_zeros(one: Tensor | None, other: Tensor | None) -> Tensor:
    """A gradient; zeros like the other where there is none."""
    if one is None:
        assert other is not None
        return torch.zeros_like(other)
    return one


def _digest(grad: Tensor) -> Tensor:
    """A weighted sum of each stretch of a gradient: linear in it, and small."""
    flat = (grad.to_dense() if grad.is_sparse else grad).reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    if not flat.numel():
        return flat
    wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
    each = min(_STRETCH, flat.numel())
    weights = (1.7 * torch.arange(each, device=flat.device, dtype=wide) + 0.3).cos()
    whole = flat.numel() // each * each
    sums = [flat[:whole].view(-1, each).to(wide).mv(weights)]
    if whole < flat.numel():
        sums.append((flat[whole:].to(wide) * weights[: flat.numel() - whole]).sum().reshape(1))
    return torch.cat(sums).to(flat.dtype)

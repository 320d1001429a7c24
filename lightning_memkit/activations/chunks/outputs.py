"""Joins what the chunks of a call give, in memory for the whole from the first chunk on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lightning_memkit.activations.chunks.axes import ChunkAxis, Ranges


@dataclass(frozen=True)
class OutputPlace:
    """Where one output has the rows or tokens of each axis.

    Attributes:
        dims: the dimension, an axis; None for an output that is the same in every chunk.
        ratios: how many entries a row or token has there.
        is_differentiable: whether gradients come back for it.
    """

    dims: tuple[int | None, ...] = ()
    ratios: tuple[int, ...] = ()
    is_differentiable: bool = True

    def with_axis(self, dim: int | None, ratio: int) -> "OutputPlace":
        """The place with one axis more."""
        return replace(self, dims=(*self.dims, dim), ratios=(*self.ratios, ratio))

    def along(self, axis: int, whole: Tensor, begin: int, end: int) -> Tensor:
        """The view of some rows or tokens of an output."""
        dim, ratio = self.dims[axis], self.ratios[axis]
        return whole if dim is None else whole.narrow(dim, begin * ratio, (end - begin) * ratio)

    def narrowed(self, whole: Tensor, chunk: Ranges) -> Tensor:
        """The view of the whole output, or of its gradient, that belongs to a chunk."""
        for axis, (begin, end) in enumerate(chunk):
            whole = self.along(axis, whole, begin, end)
        return whole

    def is_of(self, chunk: Ranges) -> bool:
        """Whether the chunk computes it: what is the same in every chunk is taken from the first."""
        return all(dim is not None or begin == 0 for (begin, _), dim in zip(chunk, self.dims, strict=True))


class JoinedOutputs:
    """The outputs of a whole call, filled chunk by chunk.

    Args:
        places: of the tensors among the outputs' leaves, in order.
        axes: by what the call is split.
    """

    def __init__(self, places: Sequence[OutputPlace], axes: Sequence[ChunkAxis]) -> None:
        self._places, self._axes = places, axes
        self._whole: list[Tensor] = []

    def add(self, chunk: Ranges, leaves: Sequence[Any]) -> None:
        """Copy what a chunk gave to where it belongs."""
        found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not self._whole:
            self._whole = [self._empty(place, one) for place, one in zip(self._places, found, strict=True)]
        for place, whole, one in zip(self._places, self._whole, found, strict=True):
            if place.is_of(chunk):
                place.narrowed(whole, chunk).copy_(one.detach())

    def tensors(self) -> list[Tensor]:
        """The whole outputs."""
        return self._whole

    def _empty(self, place: OutputPlace, one: Tensor) -> Tensor:
        shape = list(one.shape)
        for axis, dim, ratio in zip(self._axes, place.dims, place.ratios, strict=True):
            if dim is not None:
                shape[dim] = axis.count * ratio
        return one.new_empty(shape)

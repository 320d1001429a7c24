"""Which dimension of which argument a call is split by, and where its chunks begin and end."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

AxisName = Literal["rows", "tokens"]
Ranges = tuple[tuple[int, int], ...]  # of one chunk: begin and end, an axis
_DIMS = {"rows": (0,), "tokens": (1, 0, 2)}  # where a dimension of the right length is looked for, in order
_DOCUMENT_ENDS = "cu_seqlens"


class ChunkError(ValueError):
    """A module can't be run in chunks with the same result: what differs, and the remedy."""


@dataclass(frozen=True)
class ChunkAxis:
    """One way in which a call is split.

    Attributes:
        name: rows, or tokens within rows.
        size: at most so many in a chunk.
        count: how many there are in this call.
        dims: for each leaf of the arguments, the dimension that is split; None for one that every chunk gets whole.
        ends: where a chunk may end, if that is not everywhere: where documents do.
    """

    name: AxisName
    size: int
    count: int
    dims: tuple[int | None, ...]
    ends: tuple[int, ...] | None = None

    def ranges(self) -> list[tuple[int, int]]:
        """Begin and end of each chunk: nearly equal lengths, or as many whole documents as `size` has room for."""
        if self.ends is None:
            chunks = max(1, -(-self.count // self.size))
            bounds = [index * self.count // chunks for index in range(chunks + 1)]
        else:
            bounds = [0]
            for end, following in zip(self.ends, (*self.ends[1:], float("inf")), strict=True):
                if following - bounds[-1] > self.size:
                    bounds.append(end)
            bounds += [self.count] if bounds[-1] < self.count else []
        return list(zip(bounds, bounds[1:], strict=False))

    def first(self, most: int) -> "ChunkAxis":
        """The axis of a call with the first rows or tokens only: at most so many, but two, or two documents."""
        if self.ends is None:
            return replace(self, count=min(self.count, max(2, most)))
        fitting = [end for end in self.ends[1:] if end <= most] or list(self.ends[1:2] or self.ends[:1])
        return replace(self, count=fitting[-1], ends=tuple(end for end in self.ends if end <= fitting[-1]))

    def halves(self) -> tuple[tuple[int, int], ...]:
        """The call in two, or whole where there is nothing to split."""
        ends = range(1, self.count + 1) if self.ends is None else self.ends
        middle = ends[len(ends) // 2 - 1] if len(ends) > 1 else self.count
        return ((0, middle), (middle, self.count)) if middle < self.count else ((0, self.count),)


def find_axis(name: AxisName, size: int, leaves: Sequence[tuple[str, Any]]) -> ChunkAxis | None:
    """The axis of a call's arguments, as long as the first tensor that has one; None if none has."""
    tensors = [(path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor) and not is_ends(path)]
    first = _DIMS[name][0]
    count = next((leaf.shape[first] for _, leaf in tensors if leaf.ndim > first), None)
    if count is None:
        return None
    dims = tuple(
        next((dim for dim in _DIMS[name] if dim < leaf.ndim and leaf.shape[dim] == count), None)
        if isinstance(leaf, Tensor) and not is_ends(path)
        else None
        for path, leaf in leaves
    )
    return ChunkAxis(name, size, count, dims)


def paths_and_leaves(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str] = ()
) -> tuple[list[tuple[str, Any]], Any]:
    """The leaves of a call's arguments, each with its path; and the structure.

    Args:
        args: given by position.
        kwargs: given by name.
        names: what those by position are called.
    """
    found, structure = tree_flatten_with_path((args, kwargs))
    return [(_path(path, names), leaf) for path, leaf in found], structure


def _path(path: Any, names: Sequence[str]) -> str:
    is_named, first, *rest = path
    if is_named.idx:
        place = str(first.key)
    else:
        place = names[first.idx] if first.idx < len(names) else f"argument {first.idx}"
    return f"{place}{''.join(map(str, rest))}"


def is_ends(path: str) -> bool:
    """Whether an argument says where packed documents end, by its name."""
    return _DOCUMENT_ENDS in path


def chunks_of(axes: Sequence[ChunkAxis]) -> list[Ranges]:
    """Every chunk of a call; all of the first rows' tokens before the next rows."""
    return list(product(*(axis.ranges() for axis in axes)))


def narrowed(leaf: Tensor, index: int, axes: Sequence[ChunkAxis], chunk: Ranges) -> Tensor:
    """The view of an argument that a chunk gets."""
    for axis, (begin, end) in zip(axes, chunk, strict=True):
        dim = axis.dims[index]
        if dim is not None:
            leaf = leaf.narrow(dim, begin, end - begin)
    return leaf


def as_dense(part: Tensor, whole: Tensor) -> Tensor:
    """A view's copy where it lost the whole's order in memory: modules and kernels may ask their arguments for it."""
    return part.contiguous() if whole.is_contiguous() else part


def document_ends(cu_seqlens: Tensor, begin: int, end: int) -> Tensor:
    """The ends of the documents between two of them, counted from the first."""
    return cu_seqlens[(cu_seqlens >= begin) & (cu_seqlens <= end)] - begin

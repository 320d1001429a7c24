"""Walk tensors in pieces that fit a CPU cache; on other devices each tensor is one piece.

The elementwise passes of this package are bound by memory. On a CPU, ten passes over a piece that stays in
the cache cost about as much as one pass over the whole tensor; temporaries are bounded by the piece, too.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 16
FIRST_ELEMENT = "_memkit_first_element"  # of a slice shown as a parameter: where it begins in the whole one


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which this process holds a part."""
    return hasattr(tensor, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: the shard of a DTensor, the tensor itself otherwise."""
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else to_local().detach()


def shards(tensors: Sequence[Any]) -> list[Tensor]:
    """`local_part` of each of many DTensors where autograd is off; what `to_local` would wrap is left as it is."""
    parts = [tensor._local_tensor for tensor in tensors]
    return parts if all(type(part) is Tensor for part in parts) else [tensor.to_local() for tensor in tensors]


def first_element(tensor: Tensor) -> int:
    """Where a shard or a slice begins in the whole tensor, in elements; 0 for one that isn't sharded by its rows."""
    if hasattr(tensor, FIRST_ELEMENT):
        return getattr(tensor, FIRST_ELEMENT)
    sharded: Any = tensor
    placements = getattr(sharded, "placements", ())
    if not any(placement.is_shard() for placement in placements):
        return 0
    if not all(placement.is_replicate() or placement.is_shard(0) for placement in placements):
        return 0  # such a shard is no run of elements
    return _first_row(tensor.shape, sharded.device_mesh, placements) * math.prod(tensor.shape[1:])


@lru_cache(maxsize=4096)
def _first_row(shape: torch.Size, mesh: Any, placements: tuple[Any, ...]) -> int:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return int(compute_local_shape_and_global_offset(shape, mesh, placements)[1][0])


def surely_finite(tensor: Tensor) -> bool:
    """Whether a cheap look says that a tensor holds neither NaN nor infinity; False where looking is not cheap.

    One NaN or infinity makes the sum one, and on a CPU a sum costs a tenth of `isnan` and its mask. On other
    devices asking would wait for the device.
    """
    return tensor.device.type == "cpu" and math.isfinite(tensor.sum().item())


def flat_views(*tensors: Tensor) -> tuple[Tensor, ...] | None:
    """One-dimensional views in storage order, or None where the tensors have gaps or unlike strides."""
    first = tensors[0]
    if all(tensor.is_contiguous() for tensor in tensors):
        return tuple(tensor.detach().view(-1) for tensor in tensors)
    dense = torch.empty_like(first, device="meta").stride() == first.stride()
    if not dense or any(tensor.stride() != first.stride() for tensor in tensors):
        return None
    return tuple(
        tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset()) for tensor in tensors
    )


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matching pieces of equally shaped tensors, in storage order; writing to a piece writes to its tensor."""
    flat = flat_views(*tensors)
    if flat is None or tensors[0].device.type != "cpu" or tensors[0].numel() <= BLOCK_ELEMENTS:
        yield tuple(tensor.detach() for tensor in tensors) if flat is None else flat
        return
    yield from zip(*(tensor.split(BLOCK_ELEMENTS) for tensor in flat), strict=True)

"""Walks tensors in chunks that fit a CPU cache; on other devices each tensor is one chunk.

The elementwise passes of this package are bound by memory bandwidth. On a CPU, ten passes over a chunk that
stays in the cache cost about as much as one pass over the whole tensor; the chunk also bounds the
temporaries.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 16
# Attribute of a slice that stands for a parameter: its offset in the whole.
FIRST_ELEMENT = "_memkit_first_element"


def quick_reads() -> AbstractContextManager[None]:
    """A context in which `grad`, `dtype` and the like of a DTensor are read without asking its `__torch_function__`.

    A step reads them of each parameter, so that asking is a good part of the host's time. For what is read of
    parameters only: a gradient may be a stand-in without memory, whose `__torch_function__` is the error that says so.
    See "Extending PyTorch" in torch's documentation.
    """
    return torch._C.DisableTorchFunctionSubclass()


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which this process holds one shard."""
    return hasattr(tensor, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """The tensor that this process holds: the shard of a DTensor, the tensor itself otherwise."""
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else to_local().detach()


def shards(tensors: Sequence[Any]) -> list[Tensor]:
    """`local_part` of many DTensors at once, while autograd is off.

    Reads `_local_tensor` to skip the autograd wrapping of `to_local`, except where a shard is a tensor
    subclass.
    """
    parts = [tensor._local_tensor for tensor in tensors]
    return parts if set(map(type, parts)) <= {Tensor} else [tensor.to_local() for tensor in tensors]


def first_element(tensor: Tensor) -> int:
    """The offset of a shard or slice in the whole tensor, in elements; 0 if it is not sharded by rows."""
    if hasattr(tensor, FIRST_ELEMENT):
        return getattr(tensor, FIRST_ELEMENT)
    sharded: Any = tensor
    placements = getattr(sharded, "placements", ())
    if not any(placement.is_shard() for placement in placements):
        return 0
    if not all(placement.is_replicate() or placement.is_shard(0) for placement in placements):
        return 0  # this shard is not one contiguous run of elements
    return _first_row(tensor.shape, sharded.device_mesh, placements) * math.prod(tensor.shape[1:])


@lru_cache(maxsize=4096)
def _first_row(shape: torch.Size, mesh: Any, placements: tuple[Any, ...]) -> int:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return int(compute_local_shape_and_global_offset(shape, mesh, placements)[1][0])


def surely_finite(tensor: Tensor) -> bool:
    """Whether a cheap test shows that a tensor holds neither NaN nor infinity; False where no cheap test exists.

    A single NaN or infinity makes the sum NaN or infinite. On a CPU the sum costs a tenth of `isnan` with its
    mask; on other devices reading the result would synchronize.
    """
    return tensor.device.type == "cpu" and math.isfinite(tensor.sum().item())


def flat_views(*tensors: Tensor) -> tuple[Tensor, ...] | None:
    """One-dimensional views in storage order; None if the tensors have gaps or different strides."""
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
    """Yield matching chunks of equally shaped tensors in storage order, as views into the tensors."""
    flat = flat_views(*tensors)
    if flat is None or tensors[0].device.type != "cpu" or tensors[0].numel() <= BLOCK_ELEMENTS:
        yield tuple(tensor.detach() for tensor in tensors) if flat is None else flat
        return
    yield from zip(*(tensor.split(BLOCK_ELEMENTS) for tensor in flat), strict=True)

"""The shard of a tensor that this rank holds."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_box(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """Start and end index of this rank's shard along each dimension; of a plain tensor all of it.

    Raises:
        ValueError: a DTensor's layout does not give each rank one contiguous box.
    """
    if not isinstance(tensor, DTensor):
        return tuple((0, size) for size in tensor.shape)
    odd = [placement for placement in tensor.placements if type(placement) not in (Shard, Replicate)]
    if odd:
        raise ValueError(
            f"A tensor of shape {tuple(tensor.shape)} has the placement {odd[0]}; only Shard and Replicate leave one "
            "box a rank: shard it over one mesh dimension, or load a full state dict."
        )
    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple((start, start + size) for start, size in zip(offsets, shape, strict=True))


def sharded_like(whole: Tensor, tensor: Tensor) -> Tensor:
    """A copy of this rank's shard of a whole tensor, laid out like another one.

    Args:
        whole: held by every rank; of the other's shape, of any dtype.
        tensor: a DTensor, or a plain tensor, for which all is kept.
    """
    if not isinstance(tensor, DTensor):
        return whole.clone()
    # Not `DTensor.from_local`, which would put it on the mesh's device, even if FSDP2 offloads the shard.
    part = torch.empty_like(tensor, dtype=whole.dtype)
    local_part(part).copy_(whole[tuple(slice(start, end) for start, end in local_box(tensor))])
    return part


def local_part(tensor: Tensor) -> Tensor:
    """This rank's memory of a tensor; writing to it changes the tensor."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()

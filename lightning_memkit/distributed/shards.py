"""Which part of a sharded tensor this rank keeps."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_box(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """First and past-the-last index along each dimension of what this rank keeps; all of a plain tensor.

    Raises:
        ValueError: a DTensor is laid out in another way than in one contiguous box a rank.
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
    """This rank's part of a whole tensor that every rank holds, laid out as another one is; a copy.

    Args:
        whole: of the other's shape, of any dtype.
        tensor: a DTensor, or a plain tensor, of which all is kept.
    """
    if not isinstance(tensor, DTensor):
        return whole.clone()
    # `DTensor.from_local` would put it on the mesh's device, where what FSDP2 offloads has no room.
    part = torch.empty_like(tensor, dtype=whole.dtype)
    local_part(part).copy_(whole[tuple(slice(start, end) for start, end in local_box(tensor))])
    return part


def local_part(tensor: Tensor) -> Tensor:
    """The memory of what this rank keeps; writing to it changes the tensor."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()

"""Clip sharded gradients by their global norm without leaving peers of an out-of-memory rank waiting."""

from collections.abc import Callable, Iterable
from math import isinf
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor, Shard

from lightning_memkit.distributed.timeouts import waiting_for_ranks
from lightning_memkit.memory.out_of_memory import is_out_of_memory


def can_clip(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether all gradients are sharded over the same one-dimensional mesh."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    meshes = {gradient.device_mesh for gradient in gradients if isinstance(gradient, DTensor)}
    return (
        len(meshes) == 1
        and all(isinstance(g, DTensor) and isinstance(g.placements[0], Shard) for g in gradients)
        and all(mesh.ndim == 1 for mesh in meshes)
    )


@torch.no_grad()
def clip_sharded_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    any_failed: Callable[[bool], bool],
    norm_type: float = 2.0,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for sharded gradients, bitwise; ranks agree before its all-reduce.

    All memory is allocated before the ranks agree; afterwards the norm is computed, and gradients are scaled,
    in place.

    Args:
        parameters: all sharded over one mesh (`can_clip`).
        max_norm: the largest norm over all ranks.
        any_failed: tells the other ranks whether this one failed; returns whether any did.
        norm_type: the norm's order; `inf` for the largest value.

    Returns:
        The whole norm before clipping.

    Raises:
        OutOfMemoryError: on every rank, if one ran out of memory; gradients are unchanged.
    """
    gradients: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    local = [gradient.to_local() for gradient in gradients]
    norms = norm = None
    try:
        norms = torch.stack(_norms_of(local, norm_type))
        norm, coefficient = norms.new_empty(()), norms.new_empty(())
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        norms = norm = coefficient = None
    if any_failed(norms is None) or norms is None or norm is None or coefficient is None:
        raise torch.OutOfMemoryError("A rank ran out of memory where gradients are clipped.")
    group: Any = gradients[0].device_mesh.get_group()
    with waiting_for_ranks("gradients' norms were added up", group):
        if isinf(norm_type):
            distributed.all_reduce(norms, op=ReduceOp.MAX, group=group)
        else:
            norms.pow_(norm_type)
            distributed.all_reduce(norms, group=group)
            norms.pow_(1.0 / norm_type)
    torch.linalg.vector_norm(norms, norm_type, out=norm)
    coefficient.copy_(norm).add_(1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0)
    torch._foreach_mul_(local, coefficient)
    return norm


def _norms_of(gradients: list[Tensor], norm_type: float) -> list[Tensor]:
    """Each gradient's own norm, grouped by dtype in torch's order."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    return [norm for alike in by_dtype.values() for norm in torch._foreach_norm(alike, norm_type)]

"""What the scripts that run on several ranks share."""

import os
import sys
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def leave() -> None:
    """End a rank's process, successfully, once all ranks are here."""
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort a process that exits by the usual way


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded by its first dimension over all ranks, in host memory."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu()
    assert tensor.placements == (Shard(0),)
    shards: list[Any] = [None] * torch.distributed.get_world_size()
    local: Any = tensor.detach()
    torch.distributed.all_gather_object(shards, local.to_local().cpu())
    return torch.cat(shards)

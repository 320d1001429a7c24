"""Parameters in the place of which FSDP2 puts others while it runs."""

import sys

from torch import nn


def are_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 puts other tensors in the place of a module's parameters while it runs."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(one, fsdp.FSDPModule) for one in module.modules())


def shards_of(module: nn.Module) -> dict[tuple[int, str], nn.Parameter]:
    """The shards of a module's parameters, by the module and the name that they have in it."""
    from lightning_memkit.distributed.fsdp2 import sharded_parameters  # it loads torch.distributed

    return sharded_parameters(module)

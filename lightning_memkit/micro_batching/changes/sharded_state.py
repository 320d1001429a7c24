"""Find the shards of parameters that FSDP2 replaces while it runs."""

import sys

from torch import nn


def are_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 shards a module, and so replaces its parameters while it runs."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(one, fsdp.FSDPModule) for one in module.modules())


def shards_of(module: nn.Module) -> dict[tuple[int, str], nn.Parameter]:
    """The shards of a module's parameters, by the id of the owning module and the name in it."""
    from lightning_memkit.distributed.fsdp2 import sharded_parameters  # it loads torch.distributed

    return sharded_parameters(module)

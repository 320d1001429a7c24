"""Steps of which the host's time is measured: of shards in a group of one rank, and within a backward."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Parameter

from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.gradient_release import release_gradients


@contextmanager
def one_rank(device_type: str) -> Iterator[DeviceMesh]:
    """A process group of this process alone: shards of it are whole, and cost their host what shards cost."""
    backend = "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield init_device_mesh(device_type, (1,))
        finally:
            distributed.destroy_process_group()


def in_place(parameters: list[Parameter]) -> list[Parameter]:
    """The parameters as they are."""
    return parameters


def on_mesh(mesh: DeviceMesh, parameters: list[Parameter]) -> list[Parameter]:
    """The parameters and their gradients as DTensors, as FSDP2 has them."""
    placed = []
    for parameter in parameters:
        placed.append(Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
        assert parameter.grad is not None
        placed[-1].grad = distribute_tensor(parameter.grad, mesh, [Shard(0)])
    return placed


def backward_and_step(
    parameters: list[Parameter], learning_rate: float, bundle_bytes: int | None
) -> Callable[[], None]:
    """The backward of a sum and the step of one optimizer, whose gradients are released in buckets of this size.

    Args:
        parameters: in bfloat16.
        learning_rate: of AdamW.
        bundle_bytes: as in `release_gradients`; None does not release them.
    """
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate)
    compensate(optimizer)
    if bundle_bytes is not None:
        release_gradients(optimizer, bundle_bytes=bundle_bytes)

    def act() -> None:
        optimizer.zero_grad()
        torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
        optimizer.step()

    return act

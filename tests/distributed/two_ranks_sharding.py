"""Run on ranks by test_sharding.py: a net of blocks, sharded and stepped on two ranks."""

import sys
import warnings
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_memkit.distributed.sharding import Sharding, shard_blocks
from tests.plugins.ranks import leave


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 33), nn.Linear(33, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    """`loss` uses parameters and is not `forward`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 1)

    def loss(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def stepped(net: Net, x: Tensor) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.loss(x).backward()
    optimizer.step()
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in net.named_parameters()}


def main(path: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    found: dict[Any, Any] = {stage: sharded(mesh, stage) for stage in (2, 3)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shard_blocks(nn.Linear(8, 8), mesh)
    found["warnings"] = [str(one.message) for one in caught]
    if distributed.get_rank() == 0:
        torch.save(found, path)
    leave()


def sharded(mesh: Any, stage: int) -> dict[str, Any]:
    net, other = Net(), Net()
    names = [name for name, _ in shard_blocks(net, mesh, Sharding(stage=stage), forward_methods=["loss"])]
    elements = sum(parameter.to_local().numel() for parameter in net.parameters())  # pyright: ignore
    x = torch.full((4, 8), distributed.get_rank() + 1.0)
    weights = stepped(net, x)
    shard_blocks(other, mesh, Sharding(stage=stage), forward_methods=["loss"])
    other.loss(x)
    gathered = not isinstance(next(other.blocks[0].parameters()), DTensor)
    return {"names": names, "elements": elements, "gathered after the forward": gathered, "weights": weights}


if __name__ == "__main__":
    main(*sys.argv[1:])

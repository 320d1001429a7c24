# pyright: reportAttributeAccessIssue=false
"""Run on ranks by test_weights.py: shards get their values from files, and from initialisers."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_memkit.distributed.sharding import Sharding, shard_blocks
from lightning_memkit.initialization import load_weights
from lightning_memkit.initialization.building import build_empty, build_on
from lightning_memkit.initialization.materialization import materialize
from tests.activations.models import transformers_model
from tests.distributed.two_ranks_sharding import Net
from tests.plugins.ranks import leave


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 8)
        self.out = nn.Linear(8, 5, bias=False)
        self.out.weight = self.table.weight


def sharded(mesh: Any, build: Any, **options: Any) -> nn.Module:
    with build_empty("cpu", torch.bfloat16):
        net = build()
    shard_blocks(net, mesh, Sharding(**options), forward_methods=["loss"] if hasattr(net, "loss") else [])
    assert all(isinstance(parameter, DTensor) and parameter.is_meta for parameter in net.parameters())
    return net


def kept(net: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.to_local().detach().clone() for name, parameter in net.named_parameters()}  # pyright: ignore


def full(net: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.full_tensor().detach() for name, parameter in net.named_parameters()}  # pyright: ignore


def main(path: str, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    mesh, rank = init_device_mesh("cpu", (2,)), distributed.get_rank()
    found: dict[str, Any] = {}
    for source in sorted(Path(folder).iterdir()):
        net = sharded(mesh, Tied)
        load_weights(net, source, device="cpu")
        found[source.name] = kept(net)
        assert net.out.weight is net.table.weight
    net.loss(torch.ones(2, 8, dtype=torch.bfloat16)).backward()  # pyright: ignore[reportCallIssue]
    assert all(p.grad is not None for name, p in net.named_parameters() if not name.startswith("table"))

    torch.manual_seed(7 if rank == 0 else 99)  # ranks that were seeded apart draw alike all the same
    net = sharded(mesh, Tied, cpu_offload=True)
    torch.manual_seed(7 if rank == 0 else 99)
    own = torch.get_rng_state()
    materialize(net, "cpu")
    found["random state kept"] = torch.equal(own, torch.get_rng_state())
    found["materialized"] = full(net)
    model = sharded(mesh, lambda: transformers_model("LlamaForCausalLM"))
    torch.manual_seed(7)
    materialize(model, "cpu")
    found["llama"] = full(model)
    found["llama buffers"] = dict(model.named_buffers())
    replicated = sharded(init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shard")), Tied)
    torch.manual_seed(rank)
    materialize(replicated, "cpu")
    found["copies"] = kept(replicated)

    with build_on("cpu"):
        columns = nn.Linear(6, 5, bias=False)
    columns.weight = nn.Parameter(distribute_tensor(columns.weight.detach(), mesh, [Shard(1)]))
    values = torch.arange(30.0).view(5, 6)
    if rank == 0:
        torch.save({"weight": values}, f"{path}.columns")
    distributed.barrier()
    load_weights(columns, f"{path}.columns")
    found["columns"] = columns.weight.to_local()  # pyright: ignore
    gathered: list[Any] = [None, None]
    distributed.all_gather_object(gathered, found)
    if rank == 0:
        torch.save({"ranks": gathered}, path)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])

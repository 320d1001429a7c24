# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""Run by torchrun in test_offload.py: steps of DDP and FSDP2 with activations offloaded, the host as the device."""

import sys
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_memkit import checkpoint_modules
from lightning_memkit.activations.offload import offload_activations
from tests.activations.offload_models import Deep, host_as_device, ids
from tests.plugins.ranks import leave

# 5 x 7 tokens: no activation has as many elements as a parameter.
ROWS, LENGTH = 5, 7


def built(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = Deep()
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind.startswith("fsdp2"):
        mesh = init_device_mesh("cpu", (2,))
        policy = (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32) if "mixed" in kind else MixedPrecisionPolicy()
        )
        for block in model.blocks:
            if "nested" in kind:  # gathered within the block's forward
                fully_shard(block.mix, mesh=mesh, mp_policy=policy)
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def step(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    model(ids(ROWS, LENGTH, seed=1 + distributed.get_rank())).float().square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [(g.full_tensor() if isinstance(g, DTensor) else g).clone() for g in gradients]


def run(kind: str, checkpointed: bool) -> dict[str, Any]:
    model = built(kind)
    plain = step(model)
    undo = checkpoint_modules(model) if checkpointed else lambda: None
    with host_as_device(), offload_activations(model, min_bytes=1, pin_memory=False) as offload:
        ours = [step(model) for _ in range(2)][-1]
        moved = offload.counts.moved_bytes // 2
    undo()
    same = len(ours) == len(plain) and all(map(torch.equal, ours, plain))
    return {"same": same, "moved": moved, "again": all(map(torch.equal, step(model), plain))}


def main(path: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    found = {
        f"{kind} {checkpointed}": run(kind, checkpointed)
        for kind in ("alone", "ddp", "fsdp2", "fsdp2 nested", "fsdp2 mixed")
        for checkpointed in (False, True)
    }
    everywhere: list[Any] = [None, None]
    distributed.all_gather_object(everywhere, found)
    if distributed.get_rank() == 0:
        torch.save({f"rank {rank}": one for rank, one in enumerate(everywhere)}, path)
    leave()


if __name__ == "__main__":
    main(sys.argv[1])

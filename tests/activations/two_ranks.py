"""Run by torchrun in test_two_ranks.py: gradients of two ranks under DDP and FSDP2 with every policy."""

import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_memkit import checkpoint_modules
from tests.activations.models import VOCABULARY, Stack
from tests.plugins.ranks import leave

POLICIES = ("none", "full", "every:2", "selective", "budget:0.7", "budget:0.4")
STEPS = 3


def build() -> nn.Module:
    """The same weights everywhere, in float64."""
    torch.manual_seed(0)
    return Stack(width=32, depth=4, dropout=0.0).double().train()


def batches() -> list[Tensor]:
    """One batch a step, for all ranks."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (4, 16), generator=generator) for _ in range(STEPS)]


def train(model: nn.Module, rows: slice) -> None:
    """Plain gradient descent; the last gradients stay."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        optimizer.zero_grad()
        model(batch[rows]).square().mean().backward()
        optimizer.step()


def main(path: str) -> None:
    """Save weights and gradients of every strategy and policy."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    found: dict[str, list[Tensor]] = {}
    for strategy in ("ddp", "fsdp2"):
        for policy in POLICIES:
            inner = build()
            if policy != "none":
                checkpoint_modules(inner, policy)
            model: nn.Module = inner
            if strategy == "ddp":
                model = DistributedDataParallel(inner)
            else:
                mesh = init_device_mesh("cpu", (2,))
                for block in inner.blocks:  # pyright: ignore[reportGeneralTypeIssues]
                    fully_shard(block, mesh=mesh)
                fully_shard(inner, mesh=mesh)
            train(model, slice(2 * rank, 2 * rank + 2))
            found[f"{strategy} {policy}"] = [
                whole(tensor) for p in inner.parameters() for tensor in (p.detach(), p.grad)
            ]
    torch.save(found, f"{path}.{rank}")
    leave()


def whole(tensor: Any) -> Tensor:
    """A sharded tensor's full value."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1])

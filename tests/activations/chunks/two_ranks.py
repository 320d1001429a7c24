"""Run on ranks by test_two_ranks.py: a contrastive loss with gathered negatives, under DDP, FSDP2 and ZeRO-1."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lightning_memkit.activations.chunks.checkpoint_chunks import checkpoint_chunks
from tests.plugins.ranks import leave, whole

ROWS, WIDTH, STEPS = 12, 8, 8
STRATEGIES = ("ddp", "zero1", "fsdp2", "fsdp2 blocks", "fsdp2 across blocks")
CASES = [f"{strategy}, {chunk}" for strategy in STRATEGIES for chunk in (0, 1, 4)]


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (
            nn.Sequential(
                *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)) for _ in range(3))
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor([1.0]))
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one, other = (self.head(out) for out in (self.first(x), self.second(y)))
        return F.normalize(one, dim=1), F.normalize(other, dim=1), self.scale.exp()


def clip(one: Tensor, other: Tensor, scale: Tensor) -> Tensor:
    scores = scale * one @ other.T
    labels = torch.arange(len(scores))
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def alone() -> dict[str, Tensor]:
    """The weights of one process, with the whole batch at once."""
    net = Towers()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for batch in batches():
        optimizer.zero_grad()
        clip(*net(*batch)).backward()
        optimizer.step()
    return {name: one.detach() for name, one in net.named_parameters()}


def trained(case: str) -> dict[str, Tensor]:
    """The weights of all ranks together."""
    strategy, chunk = case.split(", ")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    net = Towers()
    step, modules = _wrapped(net, strategy)
    for module in modules if int(chunk) else ():
        checkpoint_chunks(module, rows=int(chunk))
    optimizer = _optimizer(net, strategy)
    for batch in batches():
        optimizer.zero_grad()
        one, other, scale = step(*batch[:, rank::ranks])
        scale = scale + 0 * (one.sum() + other.sum())
        loss = clip(torch.cat(all_gather(one)), torch.cat(all_gather(other)), scale)
        loss.backward()
        optimizer.step()
    return {name: whole(one) for name, one in net.named_parameters()}


def _optimizer(net: nn.Module, strategy: str) -> torch.optim.Optimizer:
    if strategy == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

        return ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-2)
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def _wrapped(net: Towers, strategy: str) -> tuple[Callable[..., Any], list[nn.Module]]:
    if strategy in ("ddp", "zero1"):
        return DistributedDataParallel(net), [net.first, net.second]
    blocks: list[nn.Module] = [block for tower in (net.first, net.second) for block in tower]
    towers: list[nn.Module] = [net.first, net.second]
    units = towers if strategy == "fsdp2" else blocks
    for unit in units:
        fully_shard(unit)
    fully_shard(net)
    if strategy == "fsdp2 across blocks":
        # The head reads what blocks give, whose weights are gone by its backward.
        return net, [net.head, *(block.get_submodule("2") for block in blocks)]
    return net, units


def main(path: str, *cases: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    found = {case: trained(case) for case in cases}
    if distributed.get_rank() == 0:
        torch.save(found, path)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])

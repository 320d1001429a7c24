"""Run on ranks by test_chunked_loss.py: DDP and FSDP2 with lazy logits against one process without them."""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lightning_memkit.loss.switch import use_chunked_loss
from tests.plugins.ranks import leave

CASES = ("DDP", "head in the root's group", "head apart, never resharded", "head apart")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body, self.head = nn.Embedding(40, 16), nn.Linear(16, 16), nn.Linear(16, 40)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.body(self.embedding(ids)).tanh())
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def batches() -> list[Tensor]:
    return list(torch.randint(40, (2, 4, 8), generator=torch.Generator().manual_seed(1)))


def gradients(model: nn.Module) -> Iterator[Tensor]:
    for parameter in model.parameters():
        gradient: Any = parameter.grad
        yield gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def distributed_model(case: str) -> nn.Module:
    net = Net()
    if case == "DDP":
        use_chunked_loss(net, heads=["head"])
        return DistributedDataParallel(net)
    fully_shard(net.body)
    if case.startswith("head apart"):
        fully_shard(net.head, reshard_after_forward=case == "head apart")
    fully_shard(net)
    use_chunked_loss(net, heads=["head"])
    return net


def main() -> None:
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = distributed.get_rank()
    whole = Net()
    torch.stack([whole(ids) for ids in batches()]).mean().backward()
    found: dict[str, Any] = {}
    for case in CASES:
        model = distributed_model(case)
        try:
            for _ in range(2):  # the second step meets what the first one left
                model.zero_grad()
                model(batches()[rank]).backward()
        except ValueError as error:
            found[case] = str(error)
        else:
            pairs = zip(gradients(model), gradients(whole), strict=True)
            found[case] = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    if rank == 0:
        torch.save(found, sys.argv[1])
    leave()


if __name__ == "__main__":
    main()

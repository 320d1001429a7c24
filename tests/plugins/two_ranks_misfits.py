"""Run on ranks by test_two_ranks_misfits.py: one rank's batch can't be split where the other's has another loss."""

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from lightning_memkit import MemoryBudget
from tests.plugins.ranks import leave, whole
from tests.plugins.toys import trainer

OTHER = 4  # the batch from which on the loss has another term


class Batches(IterableDataset):
    """Rank 0's batches `OTHER` and the next are sparse, so that they have no rows to split."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        for index in range(8):
            generator = torch.Generator().manual_seed(2 * index + self.rank)
            x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
            y = torch.randint(0, 4, (8,), generator=generator)
            is_sparse = self.rank == 0 and index in (OTHER, OTHER + 1)
            yield {"x": x.to_sparse_csr() if is_sparse else x, "y": y}


class Net(LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.seen: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = batch["x"].to_dense() if batch["x"].layout == torch.sparse_csr else batch["x"]
        scores = self.net(x)
        loss = F.cross_entropy(scores, batch["y"])
        if batch_idx < OTHER:
            return loss
        if self.kind == "counter":
            self.seen.append(loss.detach())
        return loss + 0.1 * (scores.square().mean() if self.kind == "term" else scores.exp().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Sharded(Net):
    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        for part in (self.net[0], self.net[2]):
            if not isinstance(next(part.parameters()), DTensor):
                fully_shard(part, mesh=mesh["data_parallel"])


def fitted(strategy: str, kind: str, *callbacks: Any) -> Tensor:
    torch.manual_seed(0)
    module = (Sharded if strategy == "fsdp2" else Net)(kind).double()
    chosen: Any = ModelParallelStrategy(2, 1) if strategy == "fsdp2" else "ddp"
    fit = trainer(
        *callbacks, max_epochs=1, max_steps=-1, devices=2, strategy=chosen, use_distributed_sampler=False
    )
    fit.fit(module, DataLoader(Batches(fit.global_rank), batch_size=None))
    return torch.cat([whole(parameter).flatten() for parameter in module.parameters()])


def main(strategy: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for kind in ("term", "function", "counter"):
        plain = fitted(strategy, kind)
        split = fitted(strategy, kind, MemoryBudget("1GiB", micro_batch_size=3))
        if torch.distributed.get_rank() == 0:
            print(f"differs_{kind}", float((split - plain).abs().max()), flush=True)
    leave()


if __name__ == "__main__":
    main(sys.argv[1])

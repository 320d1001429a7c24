"""Run on ranks by test_ranks.py: steps of two ranks that run out of memory at every allocation in turn."""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_memkit.memory.meter import ByteMeter
from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching.ranks.agreement import local_optimizer, ranks_of
from lightning_memkit.optim.journal import journal_steps
from lightning_memkit.plugins.seams.lightning_run import LightningRun
from tests.plugins.ranks import leave
from tests.plugins.toys import trainer

LIMIT_SECONDS = 60
ROWS = (8, 6)  # of each rank
GIVEN, SMALLER = 4, 2


class Net(LightningModule):
    """BatchNorm's buffers are rank 0's before each step under DDP; dropout draws in every part."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        norm = nn.LayerNorm(12) if kind == "fsdp2" else nn.BatchNorm1d(12)
        self.into, self.norm, self.drop, self.out = nn.Linear(5, 12), norm, nn.Dropout(0.2), nn.Linear(12, 3)

    def configure_model(self) -> None:
        if self.kind == "fsdp2" and not isinstance(self.into.weight, DTensor):
            mesh: Any = self.device_mesh
            for part in (self.into, self.norm, self.out):
                fully_shard(part, mesh=mesh["data_parallel"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.out(self.drop(self.norm(self.into(batch)).tanh())).pow(2).mean() * len(batch)

    def configure_optimizers(self) -> Any:
        if self.kind == "zero1":
            return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=1e-2)
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Sweep(Callback):
    """Takes the place of the training loop."""

    def __init__(self, path: str, stride: int) -> None:
        self.path, self.stride, self.folder = path, stride, Path(path).parent

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trainer, self.net, self.rank = trainer, pl_module, trainer.global_rank
        optimizer = trainer.optimizers[0]
        self.optimizer: Any = optimizer
        self.ranks = ranks_of(LightningRun(trainer))
        assert not self.ranks.reason, self.ranks.reason
        self.inner: Any = local_optimizer(optimizer)
        journal_steps(self.inner, ready=self.ranks.optimizer_steps, bundle_bytes=200)
        generator = torch.Generator().manual_seed(3 + self.rank)
        self.batch = torch.randn(ROWS[self.rank], 5, generator=generator)
        self.retries, self.fails_in_hook = 0, False
        if not self.stride:
            self.end()
        found: dict[str, Any] = {"cold": self.swept()}
        self.step(SMALLER)
        found["warm"], found["optimizer"] = self.swept(), self.swept_optimizer()
        found["hook"] = self.failed_in_hook()
        found["own"] = self.by_the_strategy_itself()
        found["largest"] = self.ranks.largest(3 + self.rank)
        found["unretried"] = ranks_of(LightningRun(trainer), recover=False).reason
        if self.rank == 0:
            print(found)
            torch.save(found, self.path)
        leave()

    def step(
        self, size: int, fault: ByteMeter | None = None, fault_in_optimizer: ByteMeter | None = None
    ) -> int:
        """What a runner does; the meters see all but the optimizer's step, or that step alone."""
        before, buffers = torch.get_rng_state(), None
        meter = fault or ByteMeter()
        while True:
            self.ranks.begin_step(starts_window=True)
            buffers = buffers or [buffer.clone() for buffer in self.net.buffers()]
            try:
                with meter:
                    self.ranks.attempt(lambda size=size: self.parts(size), ends_window=True)
                    if self.fails_in_hook:
                        self.fails_in_hook = False
                        raise torch.OutOfMemoryError("made to fail")
                    if not self.ranks.clip(self.net.parameters(), 0.1):
                        nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
                with fault_in_optimizer or ByteMeter() as in_optimizer:
                    self.optimizer.step()
                self.ranks.optimizer_steps()
                return meter.allocations if fault_in_optimizer is None else in_optimizer.allocations
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            self.ranks.failed()
            self.retries += 1
            torch.set_rng_state(before)
            for buffer, kept in zip(self.net.buffers(), buffers, strict=True):
                buffer.copy_(kept)
            size, meter = SMALLER, ByteMeter()

    def parts(self, size: int) -> None:
        parts = list(self.batch.split(size))
        self.optimizer.zero_grad()
        for index in range(self.ranks.most_parts(len(parts))):
            counts = index < len(parts)
            part = parts[index if counts else 0]
            self.ranks.part(lambda part=part: self.forward_and_backward(part), counts=counts,
                            smallest=lambda: self.forward_and_backward(self.batch[:1]))  # fmt: skip

    def forward_and_backward(self, part: Tensor) -> None:
        loss: Any = self.trainer.strategy.training_step(part, 0)
        (loss * (2 / sum(ROWS))).backward()

    def state(self) -> list[Tensor]:
        """Weights, states and buffers of this rank."""
        states = [
            v for p in self.inner.param_groups for w in p["params"] for v in self.inner.state[w].values()
        ]
        every = [*self.net.parameters(), *states, *self.net.buffers()]
        return [(t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in every]

    def kept(self) -> Any:
        """Returns what puts everything back."""
        weights = [p.detach().clone() for p in self.net.parameters()]
        buffers = [buffer.clone() for buffer in self.net.buffers()]
        states = {p: deepcopy(state) for p, state in self.inner.state.items()}

        @torch.no_grad()
        def put_back() -> None:
            for p, weight in zip(self.net.parameters(), weights, strict=True):
                p.copy_(weight)
            for buffer, value in zip(self.net.buffers(), buffers, strict=True):
                buffer.copy_(value)
            self.inner.state.clear()
            self.inner.state.update({p: deepcopy(state) for p, state in states.items()})
            torch.manual_seed(self.rank)

        return put_back

    def swept(self) -> dict[str, int]:
        """Every allocation of parts and clipping fails on rank 1, and on rank 0."""
        put_back = self.kept()
        put_back()
        self.step(SMALLER)
        expected = self.state()
        put_back()
        points = [int(n) for n in self.on_both(self.step(GIVEN))]
        found = {"points": 0, "equal": 0, "retried": 0}
        for rank in range(2):
            for point in range(0, points[rank], self.stride):
                put_back()
                before = self.retries
                signal.alarm(LIMIT_SECONDS)
                self.step(GIVEN, ByteMeter(fail_at=point if rank == self.rank else None))
                found["points"] += 1
                found["equal"] += min(self.on_both(same(self.state(), expected)))
                found["retried"] += self.retries == before + 1
        signal.alarm(0)
        put_back()
        return found

    def swept_optimizer(self) -> dict[str, int]:
        """Every allocation of the optimizer's step fails on rank 1; it is repaired there, and nothing is repeated."""
        put_back = self.kept()
        put_back()
        points = [int(n) for n in self.on_both(self.step(GIVEN, None, ByteMeter()))][1]
        expected, before = self.state(), self.retries
        found = {"points": 0, "equal": 0}
        for point in range(0, points, self.stride):
            put_back()
            signal.alarm(LIMIT_SECONDS)
            self.step(GIVEN, None, ByteMeter(fail_at=point if self.rank == 1 else None))
            found["points"] += 1
            found["equal"] += min(self.on_both(same(self.state(), expected)))
        signal.alarm(0)
        return {**found, "retried": self.retries - before}

    def failed_in_hook(self) -> dict[str, Any]:
        """Rank 1 fails between the backward and clipping, and rank 0 hears of it where it clips or steps."""
        put_back = self.kept()
        put_back()
        self.step(SMALLER)
        expected = self.state()
        put_back()
        before, self.fails_in_hook = self.retries, self.rank == 1
        self.step(GIVEN)
        equal = min(self.on_both(same(self.state(), expected)))
        return {"equal": bool(equal), "retried": self.retries - before}

    def by_the_strategy_itself(self) -> bool:
        """Whether ours are the weights of the same parts reduced in the last part's backward."""
        put_back = self.kept()
        put_back()
        self.step(GIVEN)
        expected = self.state()
        put_back()
        parts: list[Tensor] = list(self.batch.split(GIVEN))  # both ranks have as many
        ddp: Any = self.trainer.strategy.model
        self.optimizer.zero_grad()
        for part in parts:
            last = part is parts[-1] or not hasattr(ddp, "no_sync")
            with nullcontext() if last else ddp.no_sync():
                self.forward_and_backward(part)
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        self.optimizer.step()
        return bool(min(self.on_both(same(self.state(), expected))))

    def end(self) -> None:
        """Rank 1's step raises what no retry helps."""

        def parts() -> None:
            if self.rank == 1:
                raise KeyError("labels")
            self.parts(GIVEN)

        try:
            self.ranks.attempt(parts, ends_window=True)
        except (KeyError, RuntimeError) as error:
            (self.folder / f"{self.rank}.txt").write_text(type(error).__name__)
        os._exit(0)

    def on_both(self, value: float) -> list[int]:
        found = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        distributed.all_gather(found, torch.tensor([int(value)]))
        return [int(each) for each in found]


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) > 0 and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def main(path: str, kind: str, stride: str) -> None:
    torch.set_num_threads(1)
    strategy: Any = ModelParallelStrategy(2, 1) if kind == "fsdp2" else "ddp"
    fitted = trainer(Sweep(path, int(stride)), max_steps=1, devices=2, strategy=strategy)
    torch.manual_seed(0)
    fitted.fit(Net(kind), DataLoader(torch.randn(8, 5), batch_size=2))  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main(*sys.argv[1:])

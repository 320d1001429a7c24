"""Run on ranks by test_two_ranks_evaluation.py: evaluates on two ranks, whole and in parts; saves all results.

A case's fault is one rank's: it runs out of memory in one batch, wherever a part holds more than four samples.
"""

import os
import signal
import sys
import warnings
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from lightning_memkit import MemoryBudget
from lightning_memkit.distributed.agreement import PeerEndedError
from lightning_memkit.memory.meter import ByteMeter
from lightning_memkit.micro_batching.evaluation.engine import Observer
from lightning_memkit.micro_batching.options import BudgetOptions
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from lightning_memkit.plugins.memory_budget._evaluation import keep_budget_in_evaluation
from tests.plugins.ranks import leave
from tests.plugins.toys import ShardableTagger, tagged_rows, trainer
from tests.plugins.two_ranks import Sharded

LIMIT_SECONDS = 60
RUNS = ("validate", "test")
PLACES = ("start", "middle", "end")
UNEVEN = (28, 27), (26, 25), (29, 26)  # samples of the ranks: last batches of 4 and 3, of 2 and 1, of 5 and 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One evaluation.

    Args:
        run: the trainer's method.
        size: the most samples that fit on either rank; 0 for any.
        place: where in a step the fault is; empty for none.
        allocation: the fault is in this allocation of the step.
        at: the batch of the fault.
        rank: whose fault it is.
        gathers: the step calls collectives of its own.
        samples: of each rank.
        budget: bytes.
        returns: the rank whose step returns something.
    """

    run: str = "validate"
    size: int = 0
    place: str = ""
    allocation: int | None = None
    at: int = 2
    rank: int = 1
    gathers: bool = False
    samples: tuple[int, int] = (24, 24)
    budget: int = 2**30
    returns: int | None = None


class Evaluated:
    """What the modules of both strategies do in evaluation."""

    case: Case
    module: Any

    def build(self: Any, case: Case) -> None:
        self.case = case
        self.accuracy = MulticlassAccuracy(50, ignore_index=-100)
        self.rows = 0

    def evaluate(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        SEEN.append(len(batch["x"]))
        if len(batch["x"]) > (self.case.size or 8):
            raise torch.OutOfMemoryError("the device is full")
        case, here = self.case, (batch_idx, self.trainer.global_rank)
        fails = case.allocation is not None and here == (case.at, case.rank) and len(batch["x"]) > 4
        with ByteMeter(fail_at=case.allocation if fails else None):
            return self.step(batch, batch_idx)

    def step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        case = self.case
        self.fails("start", batch, batch_idx)
        hidden = self.mix(self.embedding(batch["x"]))[0]
        self.fails("middle", batch, batch_idx)
        counted = (batch["labels"] != -100).sum().double()
        counted_by_all = self.all_gather(counted).sum() if case.gathers else counted
        logits = self.head(hidden).flatten(0, 1)
        self.rows += len(batch["x"])
        if self.trainer.predicting:
            return logits
        self.log("loss", F.cross_entropy(logits, batch["labels"].flatten()), sync_dist=True)
        self.log("counted", counted_by_all, reduce_fx="sum")
        self.accuracy(logits, batch["labels"].flatten())
        self.log("accuracy", self.accuracy)
        self.fails("end", batch, batch_idx)
        return logits if case.returns == self.trainer.global_rank else None

    validation_step = test_step = predict_step = evaluate

    def fails(self: Any, place: str, batch: dict[str, Tensor], batch_idx: int) -> None:
        case = self.case
        if (batch_idx, self.trainer.global_rank) != (case.at, case.rank):
            return
        if place == case.place and len(batch["x"]) > 4:
            raise torch.OutOfMemoryError("the device is full")
        if place == "middle" and case.place == "error":
            raise KeyError("labels")


class Replicated(Evaluated, ShardableTagger):
    pass


class ShardedTagger(Evaluated, Sharded):
    pass


SEEN: list[int] = []


def cases(strategy: str, stride: int) -> dict[str, Case]:
    """By name; a fault in one in so many allocations. Samples of the ranks are unequal in their last batches."""
    found = {"size 3": Case(size=3, samples=UNEVEN[0])}
    for run in RUNS:
        for place in PLACES:
            found[f"{run}, {place}"] = Case(run=run, place=place, samples=UNEVEN[0])
    found["predict"] = Case(run="predict", samples=UNEVEN[0])
    found["rank 0"] = Case(place="middle", rank=0, samples=UNEVEN[1])
    found["first batch"] = Case(place="middle", at=0, samples=UNEVEN[1])
    for allocation in range(0, 24, stride):
        found[f"allocation {allocation}"] = Case(allocation=allocation)
    if strategy == "ddp":
        found |= {f"gathers, {name}": replace(case, gathers=True) for name, case in found.items()}
        found["returns"] = Case(budget=80_000, returns=1, gathers=True)
        found["refused"] = Case(size=2, gathers=True, samples=UNEVEN[2])
        found["error"] = Case(place="error", gathers=True)
    else:
        found["auto"] = Case(budget=80_000)
        found["returns"] = Case(budget=80_000, returns=1)
        found["repeats"] = Case(size=2, samples=UNEVEN[2])
    return found


def evaluated(case: Case, strategy: str, *, split: bool) -> dict[str, Any]:
    """What the trainer returns and logs, the sizes of all forwards, and how often a batch ran again."""
    kinds: dict[str, Any] = {"ddp": "ddp", "fsdp2": ModelParallelStrategy(2, 1)}
    quiet = trainer(devices=2, strategy=kinds[strategy], use_distributed_sampler=False)
    retries: list[int] = []
    options = BudgetOptions(budget_bytes=case.budget, headroom=0.0)
    observer = Observer(retried=lambda: retries.append(1))
    undo = keep_budget_in_evaluation(quiet, options, observer) if split else lambda: None
    torch.manual_seed(0)
    module: Any = (ShardedTagger if strategy == "fsdp2" else Replicated)()
    module.build(case)
    module.double()
    rows = tagged_rows(sum(case.samples))
    mine = rows[: case.samples[0]] if quiet.global_rank == 0 else rows[case.samples[0] :]
    del SEEN[:]
    data: Any = DataLoader(mine, batch_size=8)  # pyright: ignore[reportArgumentType]
    more: dict[str, Any] = {} if case.run == "predict" else {"verbose": False}
    result: Any = None
    try:
        result = getattr(quiet, case.run)(module, data, **more)
    except (BudgetError, KeyError, PeerEndedError) as error:
        result = f"{type(error).__name__}: {error}"
    undo()
    metrics = {name: float(value) for name, value in quiet.callback_metrics.items()}
    counted = {"retries": len(retries), "rows": module.rows}
    return {"result": result, "metrics": metrics, "sizes": list(SEEN), **counted}


@cache
def whole(case: Case, strategy: str) -> dict[str, Any]:
    """Lightning's own results; several cases share them."""
    return evaluated(case, strategy, split=False)


def fitted(case: Case, strategy: str) -> dict[str, Any]:
    """A fit with MemoryBudget that validates before, amidst and after; what it trained, and what it validated."""
    budget = MemoryBudget("1GiB", micro_batch_size=8, weigh_by="labels")
    kinds: dict[str, Any] = {"ddp": "ddp", "fsdp2": ModelParallelStrategy(2, 1)}
    quiet: Trainer = trainer(budget, devices=2, strategy=kinds[strategy], max_steps=6, val_check_interval=3,
                             num_sanity_val_steps=1, use_distributed_sampler=False)  # fmt: skip
    torch.manual_seed(0)
    module: Any = (ShardedTagger if strategy == "fsdp2" else Replicated)()
    module.build(case)
    rows = tagged_rows(96)[quiet.global_rank :: 2]
    data: Any = DataLoader(rows, batch_size=8)  # pyright: ignore[reportArgumentType]
    held: Any = DataLoader(rows[:20], batch_size=8)  # pyright: ignore[reportArgumentType]
    quiet.fit(module.double(), data, held)
    weights = [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in module.parameters()]
    metrics = {name: float(value) for name, value in quiet.callback_metrics.items()}
    return {
        "weights": weights,
        "metrics": metrics,
        "retries": budget.retries,
        "history": [tuple(change) for change in budget.history],
    }


def fitted_with_buffers(*, split: bool) -> dict[str, Any]:
    """Validation within a fit under DDP, which broadcasts buffers in each forward; the ranks' parts are unequal."""

    class Normalized(Replicated):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(32)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.norm(self.mix(self.embedding(batch["x"]))[0].flatten(0, 1)).square().mean()

        def evaluate(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            SEEN.append(len(batch["x"]))
            if len(batch["x"]) > most:
                raise torch.OutOfMemoryError("the device is full")
            hidden = self.norm(self.mix(self.embedding(batch["x"]))[0].flatten(0, 1))
            self.log("mean", hidden.square().mean(), sync_dist=True)

        validation_step = evaluate

    quiet: Trainer = trainer(devices=2, strategy="ddp_find_unused_parameters_true", max_steps=3,
                             use_distributed_sampler=False)  # fmt: skip
    most = 3 if split else 8
    options = BudgetOptions(budget_bytes=2**30)
    undo = keep_budget_in_evaluation(quiet, options) if split else lambda: None
    torch.manual_seed(0)
    module = Normalized()
    module.build(Case())
    rows = tagged_rows(40)
    size = 8 - 4 * quiet.global_rank  # three parts on one rank, two on the other
    data: Any = DataLoader(rows[:24], batch_size=8)  # pyright: ignore[reportArgumentType]
    other: Any = DataLoader(rows[: 3 * size], batch_size=size)  # pyright: ignore[reportArgumentType]
    del SEEN[:]
    quiet.fit(module.double(), data, other)
    undo()
    metrics = {"mean": float(quiet.callback_metrics["mean"])}
    return {"metrics": metrics, "buffers": [*module.buffers()], "sizes": list(SEEN)}


def main(path: str, strategy: str, stride: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, case in cases(strategy, int(stride)).items():
        signal.alarm(LIMIT_SECONDS)
        plain = replace(case, place="", allocation=None, at=0, rank=0, size=0, budget=2**30)
        found[name] = [whole(plain, strategy), evaluated(case, strategy, split=True)]
    signal.alarm(LIMIT_SECONDS)
    found["fit"] = [fitted(Case(place=place, at=1), strategy) for place in ("", "middle")]
    if strategy == "ddp":
        signal.alarm(LIMIT_SECONDS)
        found["buffers"] = [fitted_with_buffers(split=split) for split in (False, True)]
    signal.alarm(0)
    torch.save(found, f"{path}.{os.environ['RANK']}")
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])

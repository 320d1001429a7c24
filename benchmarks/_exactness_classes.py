"""Class weights with 1 to 10 % of positives: 48 runs in float64, batches of 32 in micro-batches of 8."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks._exactness_models import COLUMNS, PARTS, Case, Trained
from benchmarks._exactness_runs import train
from lightning_memkit import MemoryBudget

PERCENTS, SEEDS = (1, 3, 5, 10), 12
RUNS = len(PERCENTS) * SEEDS
BATCH, SIZE, EXACT = 32, 8, 1e-12


@dataclass(frozen=True)
class ClassWeights:
    """A run: whether it was equal to 1e-12, whether it was split at all."""

    percent: int
    seed: int
    equal: bool
    split: bool


class Weighted(Trained):
    """Cross-entropy whose classes weigh by how rare they are."""

    def __init__(self, percent: int) -> None:
        super().__init__()
        self.percent = percent

    def loss(self, batch: Any) -> Tensor:
        """The weighted mean."""
        x = self.logits(batch)[:, :2]
        return F.cross_entropy(x, batch["y"], weight=x.new_tensor([1.0, 100 / self.percent - 1]))


def class_weight_runs(seed: int, count: int = RUNS) -> list[ClassWeights]:
    """The first so many runs, the percents in turn."""
    runs = [(percent, 100 * seed + index) for index in range(SEEDS) for percent in PERCENTS]
    return [_run(percent, one) for percent, one in runs[:count]]


def _run(percent: int, seed: int) -> ClassWeights:
    case = Case(
        name=f"{percent}_percent", truth=PARTS, module=partial(Weighted, percent),
        columns={"x": "features", "y": f"{percent} % positives"}, batches=(BATCH,) * 10,
    )  # fmt: skip
    plain = train(case, seed, "float64")
    ours = train(case, seed, "float64", MemoryBudget("1GiB", micro_batch_size=SIZE))
    equal = ours.error is None and all(
        float((ours.weights[-1][name] - weights).abs().max()) <= EXACT
        for name, weights in plain.weights[-1].items()
    )
    return ClassWeights(percent, seed, equal, bool(ours.split_at))


def _positives(percent: int, rows: int, generator: torch.Generator) -> Tensor:
    return (torch.rand(rows, generator=generator) < percent / 100).long()


COLUMNS.update({f"{percent} % positives": partial(_positives, percent) for percent in PERCENTS})

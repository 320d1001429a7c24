"""Run on ranks by test_batch_metrics.py: a metric logged on_step under DDP, with batches of unlike sizes."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassF1Score

from lightning_memkit import MemoryBudget
from tests.plugins.ranks import leave
from tests.plugins.test_batch_metrics import CLASSES, Classifier
from tests.plugins.toys import trainer


def fit(*callbacks: Any) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    seen: list[dict[str, Tensor]] = []
    module = Classifier(MulticlassF1Score(CLASSES), seen)
    ddp = trainer(
        *callbacks, max_epochs=1, max_steps=-1, devices=2, strategy="ddp", use_distributed_sampler=False
    )
    generator = torch.Generator().manual_seed(ddp.global_rank)
    data: Any = [
        (torch.randn(n, 6, generator=generator, dtype=torch.float64), torch.arange(n) * 3 % CLASSES)
        for n in (8, 8, 5, 8 - 4 * ddp.global_rank)
    ]
    ddp.fit(module, DataLoader(data, batch_size=None))
    return seen


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    plain, split = fit(), fit(MemoryBudget("1GiB", micro_batch_size=3, within="step"))
    for ours, theirs in zip(split, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    print("equal", flush=True)
    leave()


if __name__ == "__main__":
    main()

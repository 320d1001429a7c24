"""Accumulation that changes while training goes on, under MemoryBudget, against plain Lightning."""

from collections import deque
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_memkit import MemoryBudget
from tests.plugins.toys import TokenTagger, loader, trained, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:GradientAccumulationScheduler weighs its batches equally"),
]


class Accumulates(Callback):
    """As schedulers of users' own do."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.accumulate_grad_batches = (2, 1, 3)[trainer.current_epoch]


class Tagger(TokenTagger):
    """Keeps no list of its steps, which parts would lengthen."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: Any = deque(maxlen=0)


SCHEDULERS = {
    "rising": lambda: GradientAccumulationScheduler({0: 1, 1: 3, 2: 2}),
    "falling": lambda: GradientAccumulationScheduler({0: 3, 1: 1}),
    "the user's own": Accumulates,
}


def fit(scheduler: str, *callbacks: Any, dtype: torch.dtype, **options: Any) -> tuple[Any, int]:
    module, fitted = trained(
        SCHEDULERS[scheduler](),
        *callbacks,
        module=Tagger,
        data=loader(batch_size=8, count=40),
        dtype=dtype,
        max_steps=-1,
        max_epochs=3,
        **options,
    )
    return module, fitted.global_step


@pytest.mark.sampled(3)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("size", ["auto", 3])
@pytest.mark.long
def test_a_scheduler_of_accumulation_trains_as_without(scheduler: str, size: Any) -> None:
    plain, steps = fit(scheduler, dtype=torch.float64)
    split, steps_in_parts = fit(scheduler, MemoryBudget("1GiB", micro_batch_size=size), dtype=torch.float64)
    assert steps_in_parts == steps
    torch.testing.assert_close(weights(split), weights(plain), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_whole_batches_are_accumulated_bitwise(scheduler: str) -> None:
    plain, _ = fit(scheduler, dtype=torch.float32)
    whole, _ = fit(scheduler, MemoryBudget("1GiB", micro_batch_size=8), dtype=torch.float32)
    assert torch.equal(weights(whole), weights(plain))

"""Lightning's batch size finder and learning rate finder beside MemoryBudget: they find what they find without."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memkit import MemoryBudget
from tests.plugins.toys import trainer, weights

MOST = 11  # samples that the pretended device holds at once

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*You have overridden `transfer_batch_to_device`"),
]


class Found(LightningModule):
    """Runs out of memory in training on more samples than the device holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.batch_size, self.lr = nn.Linear(6, 1), 2, 0.01

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        if len(x) > MOST:
            raise RuntimeError("CUDA out of memory. Tried to allocate a test's bytes")
        return (self.net(x) - y).square().mean()

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(64, 6, generator=generator)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=self.batch_size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def fit(tmp_path: Any, mode: str, *callbacks: Any, tuner: bool, **options: Any) -> Found:
    module = Found()
    finder = [] if tuner else [BatchSizeFinder(mode=mode, steps_per_trial=2)]
    fitted = trainer(*finder, *callbacks, max_steps=8, default_root_dir=tmp_path, **options)
    if tuner:
        Tuner(fitted).scale_batch_size(module, mode=mode, steps_per_trial=2)
    fitted.fit(module)
    return module


@pytest.mark.parametrize(
    ("mode", "tuner", "size"),
    [
        ("power", False, "auto"),
        pytest.param("binsearch", True, 3, marks=pytest.mark.slow),
        pytest.param("power", True, 12, marks=pytest.mark.slow),
    ],
)
def test_the_size_found_is_that_of_whole_batches_and_training_as_without(
    tmp_path: Any, mode: str, tuner: bool, size: Any
) -> None:
    plain = fit(tmp_path, mode, tuner=tuner)
    budgeted = fit(tmp_path, mode, MemoryBudget("1GiB", micro_batch_size=size), tuner=tuner)
    assert budgeted.batch_size == plain.batch_size <= MOST
    torch.testing.assert_close(weights(budgeted), weights(plain), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tuner", [False, True])
def test_a_finder_changes_what_an_effective_batch_is_made_of(tmp_path: Any, tuner: bool) -> None:
    budget = MemoryBudget("1GiB", effective_batch_size=16)
    with pytest.raises(ValueError, match=r"effective_batch_size=16 .* BatchSizeFinder.*remove"):
        fit(tmp_path, "power", budget, tuner=tuner)


def test_a_learning_rate_finder_finds_the_same_rate(tmp_path: Any) -> None:
    rates = []
    for callbacks in ([], [MemoryBudget("1GiB", micro_batch_size=3)]):
        module = Found()
        module.batch_size = 8
        finder = LearningRateFinder(num_training_steps=20)
        fitted = trainer(finder, *callbacks, max_steps=4, default_root_dir=tmp_path)
        fitted.fit(module)
        rates.append((module.lr, weights(module)))
    assert rates[1][0] == pytest.approx(rates[0][0], rel=1e-6)
    torch.testing.assert_close(rates[1][1], rates[0][1], rtol=1e-5, atol=1e-7)


def test_what_fails_before_the_first_step_may_be_tried_again() -> None:
    class Failing(Found):
        fails = True

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            if self.fails:
                raise IndexError("a test's")
            return super().training_step(batch, batch_idx)

    class RunsTheLoop(Callback):
        """As finders do: the loop, before training, once more after an error."""

        def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
            with pytest.raises(IndexError, match="a test's"):
                trainer.fit_loop.run()
            pl_module.fails = False

    module, plain = Failing(), Failing()
    trainer(MemoryBudget("1GiB", micro_batch_size=2), RunsTheLoop(), max_steps=4).fit(module)
    trainer(RunsTheLoop(), max_steps=4).fit(plain)
    torch.testing.assert_close(weights(module), weights(plain), rtol=1e-5, atol=1e-7)

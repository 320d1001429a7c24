"""A batch whose gradients are not finite: its step is skipped as without a budget, and training goes on."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memkit import MemoryBudget, PureBF16Precision
from tests.plugins.noise import NOISE
from tests.plugins.toys import TokenTagger, loader, trainer, weights

pytestmark = [*NOISE, pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")]
OVERFLOWS: dict[str, Any] = {
    "a factor": lambda loss: loss * 1e39,
    "a division": lambda loss: loss / torch.zeros(()),
    "a nan": lambda loss: loss + (loss - loss.detach()) * torch.tensor(float("nan")),
    "another function": lambda loss: (loss * 300).exp(),
}


class Skipping(TokenTagger):
    """Skips the step of gradients that are not finite; some batches' loss has a function more, and overflows."""

    def __init__(self, overflows: Any, at: int) -> None:
        super().__init__()
        self.overflows, self.at, self.skipped = overflows, at, []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)["loss"]
        return self.overflows(loss) if batch_idx == self.at else loss

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer_closure()
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            optimizer.step()
        else:
            self.skipped.append(batch_idx)


def ended(overflows: Any, at: int, *callbacks: Any, **options: Any) -> tuple[Tensor, list[int]]:
    torch.manual_seed(3)
    module = Skipping(overflows, at)
    trainer(*callbacks, max_steps=8, **options).fit(module, loader())
    return weights(module), module.skipped


@pytest.mark.sampled(4)
@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("name", OVERFLOWS)
@pytest.mark.long
def test_it_is_skipped_as_without_a_budget_and_training_goes_on(name: str, at: int) -> None:
    """It ended training after minutes or hours: "other terms each time that the batch runs again"."""
    plain, skipped = ended(OVERFLOWS[name], at)
    assert skipped == [at]
    ours, skipped_too = ended(OVERFLOWS[name], at, MemoryBudget("1GiB", micro_batch_size=2))
    assert skipped_too == skipped
    assert torch.allclose(ours, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["a factor", "a nan"])
@pytest.mark.long
def test_also_where_sizes_are_tuned_and_weights_are_in_bfloat16(name: str) -> None:
    plain, skipped = ended(OVERFLOWS[name], 5, plugins=[PureBF16Precision()])
    ours, skipped_too = ended(OVERFLOWS[name], 5, MemoryBudget("1GiB"), plugins=[PureBF16Precision()])
    assert skipped_too == skipped == [5]
    assert torch.allclose(ours, plain, rtol=2**-7, atol=2**-7)


class Full(Skipping):
    """Its device is full of the whole batch that is not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == self.at and len(batch["labels"]) > 4:
            raise torch.OutOfMemoryError("the device is full")
        return super().training_step(batch, batch_idx)


def test_one_that_does_not_fit_whole_is_said_not_to_be_split() -> None:
    """It was said that a micro-batch of 1 ran out of memory."""
    words = "Batch 5 runs out of memory .* and can't be split. As a whole .* its gradients are not finite"
    with pytest.raises(torch.OutOfMemoryError, match=words):
        trainer(MemoryBudget("1GiB", micro_batch_size=2), max_steps=8).fit(
            Full(OVERFLOWS["another function"], 5), loader()
        )

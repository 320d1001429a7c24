"""float16 with a GradScaler under MemoryBudget: split or retried, the scale moves as in plain training."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_memkit import MemoryBudget
from tests.gpu.card import on_cpu
from tests.gpu.models import Language, batches
from tests.gpu.runs import distance, fit
from tests.gpu.test_out_of_memory import BUDGET, SPILL, Arm
from tests.plugins.noise import NOISE
from tests.plugins.toys import weights

pytestmark = [
    pytest.mark.gpu,
    *NOISE,
    pytest.mark.filterwarnings("ignore:.*AMP with fp16 is not supported on CPU"),
]
STEPS = 6


class Half(Language):
    """By SGD: Adam's first steps are the signs of gradients, and show rounding at full size."""

    def __init__(self, overflow_at: int = -1) -> None:
        super().__init__()
        self.overflow_at = overflow_at

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        SPILL.at("forward", self.device)
        loss = super().training_step(batch, batch_idx)
        return loss * 1e30 if batch_idx == self.overflow_at else loss  # its scaled gradients are infinite

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scale(Callback):
    """The scaler's state at the end; none on the CPU, where Lightning takes bfloat16."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.state = {} if scaler is None else scaler.state_dict()


def trained(*callbacks: Callback, overflow_at: int = -1) -> tuple[Tensor, dict[str, Any]]:
    SPILL.armed, SPILL.fired = "", []
    scale = Scale()
    found = fit(
        *callbacks,
        scale,
        module=Half(overflow_at),
        data=batches(STEPS),
        steps=STEPS,
        precision="16-mixed",
    )
    return found, scale.state


def moved(ours: Tensor, plain: Tensor) -> float:
    """The difference, relative to how far training went."""
    start = weights(Half())
    return distance([ours - start], [plain - start])


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("overflow_at", [-1, 0, 3], ids=["no overflow", "at first", "later"])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_parts_end_where_the_whole_batch_ends(overflow_at: int) -> None:
    plain, scale = trained(overflow_at=overflow_at)
    if on_cpu() and overflow_at >= 0:
        pytest.skip("only on CUDA: bfloat16 does not overflow, and nothing would skip the step")
    ours, scale_of_parts = trained(MemoryBudget(BUDGET, micro_batch_size=2), overflow_at=overflow_at)
    assert scale_of_parts == scale
    assert moved(ours, plain) <= 0.02
    if overflow_at >= 0:
        assert scale["scale"] < 65536


@pytest.mark.usefixtures("device")
def test_a_retried_step_moves_the_scale_once() -> None:
    plain, scale = trained(MemoryBudget(BUDGET, micro_batch_size=8))
    budget = MemoryBudget(BUDGET, micro_batch_size=8)
    ours, scale_of_retry = trained(budget, Arm("forward"))
    assert SPILL.fired == ["forward"]
    assert budget.retries == 1
    assert scale_of_retry == scale
    assert moved(ours, plain) <= 0.02

"""A real OOM anywhere in a step: the batch runs again in smaller parts, and training ends as without the fault."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_memkit import MemoryBudget
from tests.gpu.card import needs_cuda, on_cpu
from tests.gpu.models import Decoder, Language, batches
from tests.gpu.runs import distance, fit
from tests.plugins.noise import NOISE

pytestmark = [pytest.mark.gpu, *NOISE]

BUDGET = 1 << 30
ROWS, STEPS, FAULTY_STEP = 8, 4, 2


class Spill:
    """Asks for more than the budget, once armed and at one place; no module holds it, so no retry rearms it."""

    def __init__(self) -> None:
        self.armed = ""
        self.fired: list[str] = []

    def at(self, place: str, device: torch.device) -> None:
        if place != self.armed:
            return
        self.armed = ""
        self.fired.append(place)
        if on_cpu():
            raise torch.OutOfMemoryError("as a card says it")
        torch.empty(BUDGET + 1, dtype=torch.uint8, device=device)
        pytest.fail("the allocator gave more than the budget")


SPILL = Spill()


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        SPILL.at("backward", gradients[0].device)
        return gradients[0]


class Optimizer(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        SPILL.at("optimizer", self.param_groups[0]["params"][0].device)  # the weights have moved by now
        return found


class Spilling(Language):
    """In float64, so that other sizes of parts round by next to nothing."""

    def __init__(self) -> None:
        super().__init__(lambda: Decoder(64, 64, 3, 2).double())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits: Any = InBackward.apply(self.network(batch["ids"]))
        SPILL.at("forward", self.device)
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())

    def on_after_backward(self) -> None:
        SPILL.at("on_after_backward", self.device)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        SPILL.at("on_before_optimizer_step", self.device)

    def configure_optimizers(self) -> Any:
        return Optimizer(self.parameters(), lr=1e-3)


class Arm(Callback):
    def __init__(self, place: str) -> None:
        self.place = place

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        SPILL.armed = self.place if batch_idx == FAULTY_STEP else ""


def trained(place: str, **options: Any) -> tuple[Tensor, MemoryBudget]:
    SPILL.armed, SPILL.fired = "", []
    torch.manual_seed(0)
    budget = MemoryBudget(BUDGET, micro_batch_size=ROWS)
    return fit(
        budget, Arm(place), module=Spilling(), data=batches(STEPS, ROWS), steps=STEPS, **options
    ), budget


@pytest.mark.usefixtures("device", "deterministic")
@pytest.mark.parametrize(
    "place", ["forward", "backward", "optimizer", "on_after_backward", "on_before_optimizer_step"]
)
def test_training_ends_as_without_the_fault(place: str) -> None:
    plain, untouched = trained("nowhere")
    again, _ = trained("nowhere")
    assert torch.equal(plain, again)
    assert untouched.retries == 0
    ours, budget = trained(place)
    assert SPILL.fired == [place]
    # The optimizer's own step repairs itself, in smaller bundles; nothing runs again.
    assert budget.retries == (place != "optimizer")
    assert distance([ours], [plain]) <= (1e-9 if budget.retries else 0)


class Greedy(Language):
    """From one step on it takes more for every row than the trial before the first step saw."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if batch_idx >= FAULTY_STEP:
            torch.empty(len(batch["ids"]), BUDGET // 7, dtype=torch.uint8, device=self.device)
        return super().training_step(batch, batch_idx)


def test_parts_become_as_small_as_the_allocator_wants(device: torch.device) -> None:
    needs_cuda("the CPU has no allocator that refuses")
    budget = MemoryBudget(BUDGET, micro_batch_size=ROWS)
    fit(budget, module=Greedy(lambda: Decoder(64, 64, 3, 2)), data=batches(STEPS, ROWS), steps=STEPS)
    assert budget.retries >= 1
    assert budget.history[-1].micro_batch_size < ROWS
    assert torch.cuda.max_memory_reserved(device) <= BUDGET


def test_after_the_fit_the_card_gives_what_it_has(device: torch.device) -> None:
    trained("forward")
    if not on_cpu():
        assert torch.cuda.get_per_process_memory_fraction(device) == 1.0
        assert torch.empty(2 * BUDGET, dtype=torch.uint8, device=device).numel() == 2 * BUDGET
    assert SPILL.fired == ["forward"]

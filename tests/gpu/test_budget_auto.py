"""MemoryBudget("auto") counts what this process holds of the card once; measured peaks stay within budgets."""

from typing import Any

import pytest
import torch

from lightning_memkit import MemoryBudget
from lightning_memkit.memory.limits import device_memory
from tests.gpu.card import needs_cuda, on_cpu, sized
from tests.gpu.models import Language, batches, billion, small
from tests.gpu.runs import fit
from tests.plugins.noise import NOISE

pytestmark = [pytest.mark.gpu, *NOISE]
SLACK = 1 << 30  # what contexts of other processes, and the driver's own rounding, may take meanwhile


def test_what_lies_on_the_card_already_is_within_the_budget(device: torch.device) -> None:
    """On more than half of the card: counted twice, it would leave less than nothing."""
    memory = device_memory(device)
    share = 1 << 20 if memory is None else int(0.55 * memory[1])
    free = 0 if memory is None else memory[0]
    resident = torch.empty(share, dtype=torch.uint8, device=device)
    budget = MemoryBudget("auto", micro_batch_size=4)
    fit(budget, data=batches(4))
    assert budget.sizing is not None
    assert budget.budget_bytes >= max(share, free - SLACK)
    assert len(resident) == share


def test_a_model_on_the_card_is_within_the_budget(device: torch.device) -> None:
    module = Language(billion).to(device, torch.bfloat16)
    size = sum(parameter.nbytes for parameter in module.parameters())
    before = device_memory(device)
    budget = MemoryBudget("auto", micro_batch_size=2)
    fit(budget, module=module, data=batches(2, 4), steps=2, precision="bf16-true")
    assert budget.budget_bytes > size
    if before is not None:
        assert budget.budget_bytes >= before[0] + size - SLACK


def test_a_second_fit_has_the_same_budget(device: torch.device) -> None:
    budgets, modules = [], []
    for _ in range(2):
        modules.append(Language())  # the first one's Trainer and states live on
        budget = MemoryBudget("auto", micro_batch_size=4)
        fit(budget, module=modules[-1], data=batches(4))
        budgets.append(budget.budget_bytes)
    assert min(budgets) >= sized(0.95, 0.3) * max(budgets)  # the CPU's is what other processes leave


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_sizes_that_are_chosen_stay_within_the_budget(device: torch.device, precision: Any) -> None:
    allowed = sized(2 << 30, 12 << 20)
    budget = MemoryBudget(allowed)
    fit(budget, module=Language(small), data=batches(6, 64, sized(512, 32)), steps=6, precision=precision)
    assert budget.sizing is not None
    assert 1 <= budget.sizing.micro_batch_size < 64
    assert budget.peak_bytes <= allowed
    assert budget.retries == 0
    if on_cpu():
        needs_cuda("the allocator's own peak")
    assert torch.cuda.max_memory_reserved(device) <= allowed

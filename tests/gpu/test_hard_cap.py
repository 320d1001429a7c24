"""The boundary of a cap: the allocator gives what the budget says, less a segment at the most, and never more."""

import pytest
import torch

from lightning_memkit.memory.limits import hard_cap
from tests.gpu import caps
from tests.gpu.card import needs_cuda, script

pytestmark = pytest.mark.gpu
BUDGET = 512 * caps.MIB
# A cap is a fraction of the card in floating point, and the allocator reserves by 2 MiB.
SLACK = 2 * caps.MIB
# A last segment of 20 MiB may not fit any more, where tensors of less are asked for.
SEGMENT = 24 * caps.MIB
# By which expandable segments grow; the allocator rounds up after it has looked at its cap.
EXPANDED = 20 * caps.MIB


@pytest.mark.parametrize("segments", ["", "expandable_segments:True"], ids=["default", "expandable"])
def test_the_allocator_gives_the_budget_and_no_more(segments: str) -> None:
    needs_cuda("the host has no cap")
    found = script("caps", str(BUDGET), PYTORCH_CUDA_ALLOC_CONF=segments)
    slack = SLACK + (EXPANDED if segments else 0)
    assert BUDGET - slack <= found["largest"] <= BUDGET
    for name, size in found.items():
        if name.startswith("filled"):
            assert BUDGET - SEGMENT - (EXPANDED if segments else 0) <= size <= BUDGET, name
        if name.startswith("reserved"):
            assert size <= BUDGET, name
    assert found["after"] == 2 * BUDGET


def test_two_caps_are_taken_back_one_after_the_other(device: torch.device) -> None:
    outer = hard_cap(device, BUDGET)
    inner = hard_cap(device, BUDGET // 2)
    needs_cuda("the host has no cap")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(BUDGET // 2 + SLACK, dtype=torch.uint8, device=device)
    inner()
    torch.empty(BUDGET // 2 + SLACK, dtype=torch.uint8, device=device)
    outer()
    torch.empty(BUDGET + SLACK, dtype=torch.uint8, device=device)


def test_tensors_that_exceed_the_budget_already_are_named(device: torch.device) -> None:
    held = torch.empty(4 * caps.MIB, dtype=torch.uint8, device=device)
    needs_cuda("the host has no cap")
    with pytest.raises(ValueError, match=r"less than the .* of tensors that this process has on cuda"):
        hard_cap(device, 2 * caps.MIB)
    assert held.device.type == "cuda"

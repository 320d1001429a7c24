"""Every policy on a decoder of a billion parameters in bfloat16: the same gradients, and a lower peak."""

import pytest
import torch

from lightning_memkit import checkpoint_modules
from tests.gpu.card import needs_cuda, on_cpu, sized
from tests.gpu.models import Decoder, billion, tokens
from tests.gpu.runs import assert_within_noise, gradients, peak_of

pytestmark = pytest.mark.gpu
POLICIES = ["full", "every:2", "selective", "selective:attention", "budget:0.5"]
# Of what plain training takes beside weights and gradients, at most so much is left.
LEFT = {"full": 0.45, "every:2": 0.75, "selective": 0.8, "selective:attention": 0.55, "budget:0.5": 0.75}


@pytest.fixture
def model(device: torch.device) -> Decoder:
    return billion().to(device, torch.bfloat16)


@pytest.fixture
def ids(device: torch.device) -> torch.Tensor:
    return tokens(4, sized(2048, 32)).to(device)


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_differ_by_no_more_than_plain_runs_do(
    device: torch.device, model: Decoder, ids: torch.Tensor, policy: str
) -> None:
    plain = [gradients(model, lambda: model.loss(ids)) for _ in range(3)]
    model.zero_grad()
    most = peak_of(device, lambda: model.loss(ids).backward())
    undo = checkpoint_modules(model, policy)
    for _ in range(3):  # a budget measures, then plans, then knows
        assert_within_noise(gradients(model, lambda: model.loss(ids)), plain)
    model.zero_grad()
    peak = peak_of(device, lambda: model.loss(ids).backward())
    undo()
    held = sum(parameter.nbytes for parameter in model.parameters())  # the gradients
    logits = 3 * 4 * ids.numel() * model.vocabulary if not on_cpu() else 0  # which no policy for blocks saves
    assert peak < most
    needs_cuda("on the CPU attention and norms save other bytes")
    assert peak - held - logits <= LEFT[policy] * max(0, most - held - logits) + (1 << 28)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("policy", POLICIES)
def test_with_deterministic_kernels_they_are_bitwise_the_same(
    model: Decoder, ids: torch.Tensor, policy: str
) -> None:
    plain = gradients(model, lambda: model.loss(ids))
    checkpoint_modules(model, policy)
    for _ in range(3):
        assert all(map(torch.equal, gradients(model, lambda: model.loss(ids)), plain))

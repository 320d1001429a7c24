"""Every policy on a decoder of a billion parameters in bfloat16: the same gradients, and a lower peak."""

import copy

import pytest
import torch

from lightning_memkit import checkpoint_modules
from tests.gpu.card import needs_cuda, on_cpu, sized
from tests.gpu.models import Decoder, billion, tokens
from tests.gpu.runs import assert_within_noise, distance, gradients, peak_of
from tests.plugins.noise import NOISE

pytestmark = [pytest.mark.gpu, *NOISE]
POLICIES = ["full", "every:2", "selective", "selective:attention", "budget:0.5", "auto"]
# Of what plain training takes beside weights and gradients, at most so much is left.
LEFT = {
    "full": 0.45,
    "every:2": 0.75,
    "selective": 0.8,
    "selective:attention": 0.55,
    "budget:0.5": 0.75,
    "auto": 0.8,
    "compile:0.5": 0.75,
}


@pytest.fixture
def model(device: torch.device) -> Decoder:
    return billion().to(device, torch.bfloat16)


@pytest.fixture
def ids(device: torch.device) -> torch.Tensor:
    return tokens(4, sized(2048, 32)).to(device)


def held_bytes(model: Decoder) -> int:
    """Its weights', and its gradients'."""
    return sum(parameter.nbytes for parameter in model.parameters())


def logits_bytes(model: Decoder, ids: torch.Tensor) -> int:
    """What the loss takes, which no policy for blocks saves."""
    return 3 * 4 * ids.numel() * model.vocabulary if not on_cpu() else 0


def asked(policy: str, model: Decoder, ids: torch.Tensor, most: int) -> str:
    """The policy; "auto" with a size of the whole step, AdamW's states included, in which half of the blocks' fits."""
    if policy != "auto":
        return policy
    held, logits = held_bytes(model), logits_bytes(model, ids)
    return f"auto:{4 * held + logits + int(sized(0.5, 0.9) * (most - held - logits))}"


def assert_less_is_left(policy: str, model: Decoder, ids: torch.Tensor, peaks: tuple[int, int]) -> None:
    """By the peaks of a step, with gradients, that begins with weights alone: of the policy, and of plain training."""
    peak, most = peaks
    assert peak < most
    needs_cuda("on the CPU attention and norms save other bytes")
    held, logits = held_bytes(model), logits_bytes(model, ids)
    assert peak - held - logits <= LEFT[policy] * max(0, most - held - logits) + (1 << 28)


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_differ_by_no_more_than_plain_runs_do(
    device: torch.device, model: Decoder, ids: torch.Tensor, policy: str
) -> None:
    plain = [gradients(model, lambda: model.loss(ids)) for _ in range(5)]
    model.zero_grad()
    most = peak_of(device, lambda: model.loss(ids).backward())
    undo = checkpoint_modules(model, asked(policy, model, ids, most))
    for _ in range(3):  # a budget measures, then plans, then knows
        assert_within_noise(gradients(model, lambda: model.loss(ids)), plain)
    model.zero_grad()
    peak = peak_of(device, lambda: model.loss(ids).backward())
    undo()
    assert_less_is_left(policy, model, ids, (peak, most))


def exactly(model: Decoder, ids: torch.Tensor) -> list[torch.Tensor]:
    """Loss and gradients of the same weights in float32."""
    wide = copy.deepcopy(model).float()
    return gradients(wide, lambda: wide.loss(ids))


def test_compiled_blocks_err_no_more_than_plain_ones(
    device: torch.device, model: Decoder, ids: torch.Tensor
) -> None:
    """Their kernels round where others do: both are compared with float32."""
    truth = exactly(model, ids)
    plain = gradients(model, lambda: model.loss(ids))
    most = peak_of(device, lambda: model.loss(ids).backward())
    model.zero_grad()
    undo = checkpoint_modules(model, "compile:0.5")
    for _ in range(2):
        ours = gradients(model, lambda: model.loss(ids))
        assert distance(ours, truth) <= 1.5 * distance(plain, truth)
    del ours, plain, truth
    needs_cuda("a meter of operators sees blocks that are not compiled")
    peak = peak_of(device, lambda: model.loss(ids).backward())
    undo()
    assert_less_is_left("compile:0.5", model, ids, (peak, most))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("policy", POLICIES)
def test_with_deterministic_kernels_they_are_bitwise_the_same(
    device: torch.device, model: Decoder, ids: torch.Tensor, policy: str
) -> None:
    plain = gradients(model, lambda: model.loss(ids))
    most = peak_of(device, lambda: model.loss(ids).backward())
    checkpoint_modules(model, asked(policy, model, ids, most))
    for _ in range(3):
        assert all(map(torch.equal, gradients(model, lambda: model.loss(ids)), plain))

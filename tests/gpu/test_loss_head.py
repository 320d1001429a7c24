"""The loss head at real vocabularies: no further from float64 than plain torch, without the logits in memory."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_memkit import linear_cross_entropy
from lightning_memkit.loss.backends import Backend
from tests.gpu.card import on_cpu, sized
from tests.gpu.runs import peak_of

pytestmark = pytest.mark.gpu
# Beside plain torch's own error, relative to the norm.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
VOCABULARIES = {"32k": 32_000, "128k": 128_256}


def problem(device: torch.device, words: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    tokens, width, words = sized(2048, 64), sized(1024, 32), sized(words, words // 64)
    hidden = torch.randn(tokens, width, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(words, width, device=device) / width**0.5).to(dtype).requires_grad_()
    labels = torch.randint(words, (tokens,), device=device)
    labels[::7] = -100
    return hidden, weight, labels


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits if logits.dtype is torch.float64 else logits.float(), labels)


def found(loss: Tensor, hidden: Tensor, weight: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]


def error(value: Tensor, truth: Tensor) -> float:
    return float((value.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("words", VOCABULARIES)
@pytest.mark.parametrize("backend", ["memkit", "auto"])
def test_it_errs_as_little_as_plain_torch(
    device: torch.device, words: str, dtype: torch.dtype, backend: Backend
) -> None:
    hidden, weight, labels = problem(device, VOCABULARIES[words], dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    truth = found(plain(exact[0], exact[1], labels), exact[0], exact[1])
    usual = found(plain(hidden, weight, labels), hidden, weight)
    ours = found(linear_cross_entropy(hidden, weight, labels, backend=backend), hidden, weight)
    for value, theirs, true in zip(ours, usual, truth, strict=True):
        assert error(value, true) <= error(theirs, true) + TOLERANCE[dtype]


@pytest.mark.parametrize("words", VOCABULARIES)
def test_its_peak_is_far_below_the_logits(device: torch.device, words: str) -> None:
    hidden, weight, labels = problem(device, VOCABULARIES[words], torch.bfloat16)
    size = sized(32 << 20, 4096)

    def ours() -> None:
        linear_cross_entropy(hidden, weight, labels, backend="memkit", chunk_bytes=size).backward()

    def theirs() -> None:
        plain(hidden, weight, labels).backward()

    for run in (ours, theirs):  # cuBLAS's workspaces stay from here on
        run()
        hidden.grad = weight.grad = None
    least = peak_of(device, ours)
    hidden.grad = weight.grad = None
    most = peak_of(device, theirs)
    # What both hold: the weight's gradient, once in float32 while chunks are summed.
    assert least <= 0.8 * most
    if not on_cpu():
        logits = 4 * labels.numel() * weight.size(0)
        assert most - least >= logits // 2


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_where_ignored_tokens_are_computed_nothing_waits(device: torch.device, dtype: torch.dtype) -> None:
    """The card's own word for what the simulated device counts."""
    hidden, weight, labels = problem(device, VOCABULARIES["32k"], dtype)
    truth = found(linear_cross_entropy(hidden, weight, labels, backend="memkit"), hidden, weight)
    if not on_cpu():
        torch.cuda.set_sync_debug_mode("error")
    try:
        loss = linear_cross_entropy(hidden, weight, labels, skip_ignored=False)
        ours = found(loss, hidden, weight)
    finally:
        if not on_cpu():
            torch.cuda.set_sync_debug_mode("default")
    for value, true in zip(ours, truth, strict=True):
        assert error(value, true) <= 2 * TOLERANCE[dtype]

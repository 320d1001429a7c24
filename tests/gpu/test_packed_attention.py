"""Every backend on packed documents, so long that blocks are seen whole: output and gradients of documents alone."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memkit import packed_attention
from lightning_memkit.attention.choice import refusal
from lightning_memkit.attention.documents import Documents
from tests.gpu.card import on_cpu
from tests.plugins.noise import NOISE

pytestmark = [
    pytest.mark.gpu,
    *NOISE,
    pytest.mark.filterwarnings("ignore:backend='dense_mask' makes a mask"),
]
# Blocks have 128 tokens: the second document has seven that it fills, the others none or two.
BOUNDS = (0, 90, 1100, 1101, 1500, 2048)
HEADS, FEATURES = 4, 64
WORST = 0.02  # of the largest value: five roundings of bfloat16


def alone(query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int | None) -> Tensor:
    """By the formula, each document by itself."""
    outputs = []
    for begin, end in pairwise(BOUNDS):
        q, k, v = (x[:, :, begin:end] for x in (query, key, value))
        places = torch.arange(end - begin, device=q.device)
        ahead = places - places[:, None]
        hidden = ahead > 0 if causal else torch.zeros_like(ahead, dtype=torch.bool)
        hidden |= ahead.abs() >= (window or end)
        outputs.append((q @ k.mT * FEATURES**-0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v)
    return torch.cat(outputs, 2)


def results(attend: Any, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """The output, and the gradients of a weighted sum of it."""
    given = torch.randn(3, 1, BOUNDS[-1], HEADS, FEATURES, generator=torch.Generator().manual_seed(0))
    leaves = [x.to(device, torch.bfloat16).to(dtype).transpose(1, 2).requires_grad_() for x in given]
    out = attend(*leaves)
    weights = torch.arange(out.numel(), device=device, dtype=torch.float64).cos().view(out.shape)
    out.backward(weights.to(dtype))
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["varlen", "flex", "loop", "dense_mask"])
def test_packed_documents_are_documents_alone(
    device: torch.device, backend: str, causal: bool, window: int | None
) -> None:
    bounds = torch.tensor(BOUNDS, dtype=torch.int32, device=device)
    chosen: Any = "loop" if on_cpu() else backend
    options: Any = {"causal": causal, "window": window, "backend": chosen}
    tensor = torch.empty(1, HEADS, 1, FEATURES, dtype=torch.bfloat16, device=device)
    why = refusal(chosen, tensor, tensor, Documents(cu_seqlens=bounds, causal=causal, window=window))
    if why is not None:
        pytest.skip(str(why))
    truth = results(lambda q, k, v: alone(q, k, v, causal, window), torch.float64, device)
    found = results(lambda q, k, v: packed_attention(q, k, v, bounds, **options), torch.bfloat16, device)
    assert len(found) == len(truth) == 4
    for ours, true in zip(found, truth, strict=True):
        assert float((ours.double() - true).abs().max()) <= WORST * float(true.abs().max())

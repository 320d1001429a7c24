"""No more than one chunk of activations is alive, beside what the module gives and its gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memkit.activations.chunks.checkpoint_chunks import checkpoint_chunks
from lightning_memkit.activations.chunks.finding import find_chunkable
from lightning_memkit.memory.meter import ByteMeter

WIDTH, DEPTH = 32, 12


def tower(out: int = 2) -> nn.Module:
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, out))


def peak_bytes(rows: int, chunk: int | None, requires_grad: bool = False) -> int:
    """Of the second step: the first one also asks whether rows are independent."""
    torch.manual_seed(0)
    nets = tower(), tower()
    for net in nets:
        if chunk is not None:
            checkpoint_chunks(net, rows=chunk)
    x = torch.randn(rows, WIDTH, requires_grad=requires_grad)

    def step() -> None:
        one, other = (net(x) for net in nets)
        (one @ other.T[:, :8]).square().mean().backward()

    step()
    for net in nets:
        net.zero_grad()
    x.grad = None
    with ByteMeter() as meter:
        step()
    return meter.peak_bytes


def test_one_chunk_is_alive_at_a_time() -> None:
    parameters = 2 * sum(one.numel() for one in tower().parameters()) * 4
    kept = DEPTH * WIDTH * 4  # bytes a row of one tower
    plain, chunked = peak_bytes(256, None), peak_bytes(256, 16)
    assert plain > 2 * 256 * kept
    outputs = 2 * 2 * 256 * 2 * 4 + 3 * 256 * 8 * 4  # of both towers, their gradients, the loss's own
    assert chunked < parameters + outputs + 3 * 16 * kept
    assert (
        peak_bytes(1024, 16) - chunked < 768 * 256
    )  # of a row: what the loss keeps, none of 1,536 in each tower


def test_inputs_get_their_gradient_at_its_own_size() -> None:
    assert peak_bytes(256, 16, requires_grad=True) - peak_bytes(256, 16) <= 3 * 256 * WIDTH * 4


@pytest.mark.parametrize("size", [1, 7, 64])
def test_the_check_takes_no_more_than_a_chunk(size: int) -> None:
    lengths: list[int] = []
    net: Any = tower()
    net[0].register_forward_hook(lambda _, args, out: lengths.append(len(args[0])))
    checkpoint_chunks(net, rows=size)
    net(torch.randn(100, WIDTH))
    assert max(lengths) <= max(size, 2)


def test_tokens_in_chunks_end_where_documents_do() -> None:
    """A module that attends within documents, packed in a row."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64)

        def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
            found = []
            for begin, end in zip(cu_seqlens, cu_seqlens[1:], strict=False):
                lengths.append(int(end - begin))
                q, k, v = self.inner(x[:, begin:end]).chunk(3, -1)
                found.append(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
            return torch.cat(found, 1)

    lengths: list[int] = []
    net = Attends()
    cu_seqlens = torch.tensor([0, 5, 6, 14, 34, 40])
    x = torch.randn(1, 40, WIDTH, dtype=torch.float64, requires_grad=True)
    sources = [x, *net.parameters()]
    plain = torch.autograd.grad(net(x, cu_seqlens).square().sum(), sources)
    seen: list[int] = []
    net.inner.register_forward_hook(lambda _, args, out: seen.append(args[0].shape[1]))
    checkpoint_chunks(net, tokens=15)
    net(x, cu_seqlens)
    seen.clear()
    lengths.clear()
    found = torch.autograd.grad(net(x, cu_seqlens).square().sum(), sources)
    assert lengths == 2 * [5, 1, 8, 20, 6]  # chunks of 14, 20 and 6 tokens
    for one, other in zip(found, plain, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def test_packed_rows_are_told_their_own_documents() -> None:
    class Notes(nn.Module):
        def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
            seen.append(cu_seqlens.tolist())
            return x * 2

    seen: list[list[int]] = []
    net = Notes()
    checkpoint_chunks(net, rows=1)
    x, cu_seqlens = torch.randn(3, 4, WIDTH), torch.tensor([0, 3, 4, 8, 9, 11, 12])
    net(x, cu_seqlens)
    seen.clear()
    net(x, cu_seqlens=cu_seqlens)
    assert seen[-3:] == [[0, 3, 4], [0, 4], [0, 1, 3, 4]]
    net = Notes()
    checkpoint_chunks(net, tokens=2)
    with pytest.raises(ValueError, match="documents of several rows end at different tokens"):
        net(x, cu_seqlens)


class _RootNorm(nn.Module):
    """Saves an output of its own for the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def test_nothing_outlives_the_first_step() -> None:
    """Neither asking a module nor finding it leaves a graph behind."""
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), _RootNorm(), nn.Linear(WIDTH, 2))

    def step() -> None:
        net(torch.randn(1, 64, WIDTH)).sum().backward()

    def live_bytes() -> int:
        with ByteMeter() as meter:
            step()
            net.zero_grad()
        return meter.live_bytes

    torch.manual_seed(0)
    assert live_bytes() == 0
    with ByteMeter() as meter:
        find_chunkable(net, lambda: net(torch.randn(1, 64, WIDTH)).sum(), "tokens")
    assert meter.live_bytes == 0
    checkpoint_chunks(net[1], tokens=8)
    assert live_bytes() == 0

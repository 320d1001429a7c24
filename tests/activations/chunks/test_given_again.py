"""What a small module in chunks gives to a large one is not kept, but computed again; nothing else differs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_memkit.activations.chunks.checkpoint_chunks import checkpoint_chunks
from lightning_memkit.memory.meter import ByteMeter

WIDTH, TOKENS = 16, 40


class Block(nn.Module):
    """A norm before a projection and an MLP, with a residual connection, as in a transformer."""

    def __init__(self, between: Callable[[Tensor], Any] | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(dropout))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5
        normed = self.norm(x)
        if self.between is not None:
            changed = self.between(normed)
            normed = normed if changed is None else changed
        return x + self.mlp(normed) * self.projection(normed).sigmoid()


def gradients(net: nn.Module, x: Tensor, around: bool = False) -> list[Tensor]:
    torch.manual_seed(2)
    x = x.detach().requires_grad_()
    out = checkpoint(net, x, use_reentrant=False) if around else net(x)
    assert isinstance(out, Tensor)
    return [*torch.autograd.grad(out.square().sum(), [x, *net.parameters()], allow_unused=True)]


def in_chunks(net: Block, *parts: str) -> Block:
    for name in parts:
        checkpoint_chunks(net.get_submodule(name), tokens=7)
    return net


def built(**options: Any) -> Block:
    torch.manual_seed(0)
    return Block(**options).double()


def rows() -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


ALL = ("norm", "mlp", "projection")


@pytest.mark.parametrize("around", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("parts", [ALL, ("norm", "mlp"), ("mlp",)], ids=["all", "mlp", "without norm"])
def test_gradients_are_those_of_the_unchunked_block(parts: tuple[str, ...], around: bool) -> None:
    expected, found = gradients(built(), rows()), gradients(in_chunks(built(), *parts), rows(), around)
    for one, other in zip(expected, found, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x.mul_(2),
        lambda x: x.clone(),
        lambda x: x[:, :, :],
        lambda x: x.transpose(0, 1),
        lambda x: x + 1,
    ],
    ids=["in place", "clone", "view", "other axes", "another"],
)
def test_what_was_changed_since_is_kept(between: Callable[[Tensor], Any]) -> None:
    net = in_chunks(built(between=between), *ALL)
    if between(torch.zeros(2, TOKENS, WIDTH)).shape[0] != 2:
        net.forward = lambda x: net.mlp(net.norm(x).transpose(0, 1).contiguous())  # pyright: ignore
        plain = built()
        plain.forward = lambda x: plain.mlp(plain.norm(x).transpose(0, 1).contiguous())  # pyright: ignore
    else:
        plain = built(between=between)
    for one, other in zip(gradients(plain, rows()), gradients(net, rows()), strict=True):
        assert (one is None and other is None) or torch.allclose(one, other, rtol=1e-12, atol=1e-13)


def test_a_size_of_its_own_for_the_reader() -> None:
    net = in_chunks(built(), "norm", "projection")
    checkpoint_chunks(net.mlp, tokens=5)
    for one, other in zip(gradients(built(), rows()), gradients(net, rows()), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("around", [False, True], ids=["", "checkpointed"])
def test_what_drew_random_numbers_draws_them_again(around: bool) -> None:
    """The norm's dropout: its masks when read again are those of the forward."""
    seen: list[Tensor] = []
    net = built(dropout=0.5)
    net.mlp[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    in_chunks(net, *ALL)
    gradients(net, rows(), around)  # and the check of each module
    seen.clear()
    gradients(net, rows(), around)
    chunks = -(-TOKENS // 7)
    assert len(seen) == (3 if around else 2) * chunks  # the MLP is not the block's last module
    assert all(torch.equal(a, b) for a, b in zip(seen[:chunks], seen[-chunks:], strict=True))


def test_frozen_norms_and_parameters_changed_too_early() -> None:
    net, plain = in_chunks(built(), *ALL), built()
    for one in (net, plain):
        one.norm.requires_grad_(False)
    x = rows().requires_grad_()

    def found(one: Block) -> list[Tensor]:
        return [*torch.autograd.grad(one(x).square().sum(), [x, *one.mlp.parameters()])]

    for one, other in zip(found(plain), found(net), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-13)
    out = net(x).sum()
    with torch.no_grad():
        next(net.norm.parameters()).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_the_backward_may_run_twice() -> None:
    net, x = in_chunks(built(), *ALL), rows().requires_grad_()
    out = net(x).square().sum()
    first = torch.autograd.grad(out, [x, *net.parameters()], retain_graph=True)
    second = torch.autograd.grad(out, [x, *net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Stack(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
        return x


def peak(parts: tuple[str, ...], depth: int) -> float:
    """Of the second step, in tensors of [tokens, width]."""
    torch.manual_seed(0)
    net, tokens = Stack(depth), 4096
    for block in net.blocks:
        for name in parts:
            checkpoint_chunks(block.get_submodule(name), tokens=32)
    x = torch.randn(1, tokens, WIDTH)
    net(x).sum().backward()
    net.zero_grad()
    with ByteMeter() as meter:
        net(x).sum().backward()
    return meter.peak_bytes / (4 * tokens * WIDTH)


@pytest.mark.long
def test_neither_norms_outputs_nor_inputs_of_other_blocks_are_kept() -> None:
    one, four = peak(ALL, 1), peak(ALL, 4)
    assert four - one < 3.2  # the inputs of three more blocks
    assert peak(("norm", "mlp"), 1) - one > 0.8  # the projection keeps what the norm gave


def test_checkpointing_around_runs_the_last_module_no_third_time() -> None:
    counts: list[int] = []
    net = built()
    inner, mlp, norm = net.mlp[1], net.mlp, net.norm
    inner.register_forward_hook(lambda *_: counts.append(1))
    net.forward = lambda x: mlp(norm(x))  # pyright: ignore[reportAttributeAccessIssue]
    in_chunks(net, *ALL)
    gradients(net, rows(), around=True)
    counts.clear()
    gradients(net, rows(), around=True)
    assert len(counts) == 2 * -(-TOKENS // 7)

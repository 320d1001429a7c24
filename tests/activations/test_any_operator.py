"""Blocks of all sorts of operators under every policy: bitwise the losses, gradients and buffers of plain training."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from lightning_memkit import checkpoint_modules

WIDTH, LENGTHS = 8, torch.tensor([6, 4, 3, 2])
POLICIES = ("full", "selective", "budget:0.6")

pytestmark = [
    pytest.mark.filterwarnings("ignore:The budget of"),  # where the blocks' inputs are more than it
    pytest.mark.filterwarnings("ignore:Sparse (CSR tensor support|invariant checks)"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]


class Block(nn.Module):
    """A residual block; `part` is what the case brings."""

    def __init__(self, run: Callable[["Block", Tensor], Tensor], part: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.part = part
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Recurrent(nn.Module):
    def __init__(self, kind: str, packed: bool = False, **options: Any) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(WIDTH, WIDTH, batch_first=True, **options)
        self.out = nn.Linear(self.rnn(torch.zeros(1, 1, WIDTH))[0].shape[-1], WIDTH)
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        if not self.packed:
            y, state = self.rnn(x)
            last = state[0] if isinstance(state, tuple) else state
            return x + self.out(y) * last[-1].mean(-1)[:, None, None].sigmoid()
        y, _ = self.rnn(pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False))
        return x + self.out(pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])[0])


class Cell(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cell = getattr(nn, kind)(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return x + torch.stack(outputs, 1)


class Multiple(torch.autograd.Function):
    """Several outputs, one without a gradient, one that is not used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grown, rank = x.exp(), x.argsort(-1)
        ctx.mark_non_differentiable(rank)
        ctx.save_for_backward(grown)
        return grown * 2, x.sum(-1), rank

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0] * ctx.saved_tensors[0] + gradients[1][..., None]


class OnContext(torch.autograd.Function):
    """A tensor kept as an attribute, and an input changed in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.kept = x.mul_(2).tanh()
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient * (1 - ctx.kept**2)


def conjugated(block: Block, x: Tensor) -> Tensor:
    z = torch.complex(block.linear(x), x)
    return x + (z.conj() * z * (z.conj() * 0.1).exp()).real + (z.conj().imag * x).sin()


def complex_views(block: Block, x: Tensor) -> Tensor:
    z = torch.view_as_complex(block.linear(x).unflatten(-1, (-1, 2)))
    return x + torch.view_as_real(z * z.conj().tanh()).flatten(-2)


def fourier(block: Block, x: Tensor) -> Tensor:
    mixed = torch.fft.rfft(block.linear(x)) * torch.fft.rfft(x).conj()
    return x + torch.fft.irfft(mixed, n=WIDTH)


def sparse(block: Block, x: Tensor) -> Tensor:
    places = torch.tensor([[0, 1, 2], [2, 3, 1]])
    mixing = torch.sparse_coo_tensor(places, block.part[0, :3], (WIDTH, WIDTH))
    compressed = torch.eye(WIDTH).to_sparse_csr()
    return x + (compressed @ torch.sparse.mm(mixing, block.linear(x).flatten(0, 1).t())).t().reshape(x.shape)


def nested(block: Block, x: Tensor) -> Tensor:
    return x + torch.nested.as_nested_tensor(list(block.linear(x).tanh())).to_padded_tensor(0.0)


def bagged(block: Block, x: Tensor) -> Tensor:
    rows = x.detach().abs().mul(10).long().clamp(0, 9).flatten(0, 1)
    bag = F.embedding_bag(rows, block.part, mode="max")
    weighted = F.embedding_bag(rows, block.part, mode="sum", per_sample_weights=x.flatten(0, 1))
    return x + (bag + weighted).view(x.shape)


def aligned(block: Block, x: Tensor) -> Tensor:
    scores = block.linear(x).log_softmax(-1).transpose(0, 1)
    targets = torch.tensor([[1, 2], [3, 4], [2, 2], [5, 1]])
    return x + F.ctc_loss(scores, targets, torch.full((4,), 6), torch.full((4,), 2))


def ordered(block: Block, x: Tensor) -> Tensor:
    h = block.linear(x)
    best = h.topk(3, -1)[0].sum(-1, keepdim=True) + h.max(1, keepdim=True)[0] + h.median(-1, keepdim=True)[0]
    return x + h.sort(-1)[0].tanh() * best.tanh() + h.cummax(1)[0]


def in_place(block: Block, x: Tensor) -> Tensor:
    h = block.linear(x).sigmoid()
    h = h.masked_fill(h > 0.5, 0.1).clone()
    h.index_add_(0, torch.tensor([0, 1]), torch.ones(2, 6, WIDTH)).mul_(2)
    out = torch.empty_like(x)
    for step in range(6):
        out[:, step] = block.linear(x[:, step]).tanh()
    torch._foreach_mul_([out, h], 0.5)
    return x + out * h


def checkpointed(block: Block, x: Tensor) -> Tensor:
    inner = checkpoint(lambda y: F.dropout(block.linear(y).tanh(), 0.3), x, use_reentrant=False)
    assert inner is not None
    return x + inner


def noisy(block: Block, x: Tensor) -> Tensor:
    h = F.gelu(block.linear(x)) * torch.bernoulli(torch.full_like(x, 0.7)) + F.gumbel_softmax(x, -1)
    h = F.alpha_dropout(h[torch.randperm(4)], 0.2, True) * torch.normal(0.0, 1.0, x.shape)
    return x + h * torch.empty_like(h).exponential_().clamp(max=3)


def own_generator(block: Block, x: Tensor) -> Tensor:
    kept = torch.rand(x.shape, generator=block.part) > 0.3
    return x + (block.linear(x) * torch.empty_like(x).normal_(generator=block.part)).tanh() * kept


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(10, WIDTH))


def function(run: Callable[[Tensor], Tensor]) -> Callable[[Block, Tensor], Tensor]:
    return lambda block, x: x + run(block.linear(x))


def part(block: Block, x: Tensor) -> Tensor:
    return block.part(x)


CASES: dict[str, tuple[Callable[[Block, Tensor], Tensor], Callable[[], Any]]] = {
    "LSTM": (part, lambda: Recurrent("LSTM")),
    "GRU": (part, lambda: Recurrent("GRU", num_layers=2)),
    "RNN": (part, lambda: Recurrent("RNN", nonlinearity="relu")),
    "deep_LSTM": (part, lambda: Recurrent("LSTM", num_layers=2, bidirectional=True, dropout=0.3)),
    "deep_GRU": (part, lambda: Recurrent("GRU", num_layers=2, bidirectional=True, dropout=0.3)),
    "projected_LSTM": (part, lambda: Recurrent("LSTM", proj_size=3)),
    "packed_LSTM": (part, lambda: Recurrent("LSTM", packed=True, bidirectional=True)),
    "packed_RNN": (part, lambda: Recurrent("RNN", packed=True, num_layers=2, dropout=0.2)),
    "LSTMCell": (part, lambda: Cell("LSTMCell")),
    "GRUCell": (part, lambda: Cell("GRUCell")),
    "several_outputs": (function(lambda h: Multiple.apply(h)[0]), weight),  # pyright: ignore[reportOptionalSubscript]
    "on_context": (function(lambda h: OnContext.apply(h.clone()).sin()), weight),  # pyright: ignore[reportOptionalMemberAccess]
    "conjugated": (conjugated, weight),
    "complex_views": (complex_views, weight),
    "fourier": (fourier, weight),
    "sparse": (sparse, weight),
    "bagged": (bagged, weight),
    "aligned": (aligned, weight),
    "ordered": (ordered, weight),
    "in_place": (in_place, weight),
    "checkpointed": (checkpointed, weight),
    "noisy": (noisy, weight),
    "own_generator": (own_generator, lambda: torch.Generator().manual_seed(3)),
    "rrelu": (lambda block, x: block.part(block.linear(x)), nn.RReLU),
    "rrelu_in_place": (lambda block, x: block.part(block.linear(x)), lambda: nn.RReLU(inplace=True)),
    "fake_quantized": (
        function(lambda h: torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -8, 7)),
        weight,
    ),
    "quantized": (
        function(lambda h: h * torch.quantize_per_tensor(h.detach(), 0.1, 0, torch.quint8).dequantize()),
        weight,
    ),
    "decomposed": (function(lambda h: torch.linalg.qr(h.mT)[0].mT + torch.linalg.svd(h)[1].sum()), weight),
    "attention": (part, lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)),
}


class Net(nn.Module):
    def __init__(self, run: Callable[[Block, Tensor], Tensor], make: Callable[[], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(run, make()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def trained(net: nn.Module, *, steps: int = 3) -> list[Tensor]:
    """All that the steps show: losses, gradients, buffers, and where the random numbers stand."""
    shown = []
    for step in range(steps):
        torch.manual_seed(10 + step)
        net.zero_grad()
        loss = net(torch.randn(4, 6, WIDTH))
        loss.backward()
        shown += [loss.detach(), torch.rand(1), *(buffer.clone() for buffer in net.buffers())]
        shown += [torch.zeros(0) if p.grad is None else p.grad.clone() for p in net.parameters()]
    return shown


def assert_bitwise(ours: list[Tensor], plain: list[Tensor]) -> None:
    assert len(ours) == len(plain)
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.long
def test_a_block_trains_bitwise_as_without_checkpointing(name, policy):
    net = Net(*CASES[name])
    plain = trained(copy.deepcopy(net))

    checkpoint_modules(net, policy, blocks=[Block])

    assert_bitwise(trained(net), plain)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("policy", ["selective", "budget:0.2"])  # torch's own checkpoint refuses them
def test_nested_tensors_within_a_block_are_kept(policy):
    net = Net(nested, weight)
    plain = trained(copy.deepcopy(net))

    checkpoint_modules(net, policy, blocks=[Block])

    assert_bitwise(trained(net), plain)


@pytest.mark.parametrize("name", ["LSTM", "deep_GRU", "noisy", "ordered"])
def test_the_same_holds_under_autocast(name):
    net = Net(*CASES[name])
    with torch.autocast("cpu", torch.bfloat16):
        plain = trained(copy.deepcopy(net))

        checkpoint_modules(net, "selective", blocks=[Block])

        assert_bitwise(trained(net), plain)

"""Modules in which rows or tokens act on each other, or that write, are refused in their first call."""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_memkit.activations.chunks.axes import ChunkError
from lightning_memkit.activations.chunks.checkpoint_chunks import checkpoint_chunks
from lightning_memkit.utilities.generators import Generators

ROWS, TOKENS, WIDTH = 12, 20, 8


class Meter:
    """An object of a user's own."""

    def __init__(self) -> None:
        self.count = 0


class Applies(nn.Module):
    """Something done to what a layer gives, beside a dropout."""

    queue: Tensor

    def __init__(self, function: Callable[["Applies", Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.register_buffer("queue", torch.zeros(WIDTH))
        self.calls, self.seen = 0, []
        self.meter, self.counts = Meter(), np.zeros(3)
        self.recent, self.deep = deque([0.5], maxlen=4), {"sizes": [{0}]}
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.dropout(self.layer(x)))


def counts(net: Applies, x: Tensor) -> Tensor:
    net.calls += 1
    return x


def notes(net: Applies, x: Tensor) -> Tensor:
    net.seen.append(len(x))
    return x


def queues(net: Applies, x: Tensor) -> Tensor:
    net.queue.lerp_(x.detach().flatten(0, -2).mean(0), 0.1)
    return x


def keeps(net: Applies, x: Tensor) -> Tensor:
    net.last = x
    return x


COUPLED: dict[str, Callable[[Applies, Tensor], Any]] = {
    "batch norm": lambda net, x: F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2),
    "a mean over rows": lambda net, x: x - x.mean(0),
    "the first row": lambda net, x: x - x[:1],
    "the row before": lambda net, x: x - x.roll(1, 0),
    "a sum of the rows so far": lambda net, x: x.cumsum(0),
    "rows in order": lambda net, x: x.sort(0)[0],
    "rows in pairs": lambda net, x: x + x.unflatten(0, (2, -1)).flip(0).flatten(0, 1),
    "its number": lambda net, x: x * torch.arange(len(x), dtype=x.dtype)[:, None, None],
    "how many rows": lambda net, x: x / len(x),
    "a maximum": lambda net, x: x * (x == x.amax(0)),
    "attention over rows": lambda net, x: net.attention(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1),
    "a mean as second output": lambda net, x: (x, x.mean()),
    "a number of rows": lambda net, x: {"x": x, "rows": len(x)},
    "scores of all pairs": lambda net, x: x.flatten(1) @ x.flatten(1).T,
}


def updates_a_meter(net: Applies, x: Tensor) -> Tensor:
    net.meter.count += len(x)
    return x


def counts_in_an_array(net: Applies, x: Tensor) -> Tensor:
    net.counts[0] += 1
    return x


def queues_in_a_deque(net: Applies, x: Tensor) -> Tensor:
    net.recent.append(float(x.detach().mean()))
    return x


def notes_deeply(net: Applies, x: Tensor) -> Tensor:
    net.deep["sizes"][0].add(len(net.deep["sizes"][0]))
    return x


WRITING = {
    "calls": counts,
    "meter": updates_a_meter,
    "counts": counts_in_an_array,
    "recent": queues_in_a_deque,
    "deep": notes_deeply,
    "seen": notes,
    "queue": queues,
    "last": keeps,
    "norm.num_batches_tracked": lambda net, x: net.norm(x.transpose(1, 2)).transpose(1, 2),
}
OVER_TOKENS: dict[str, Callable[[Applies, Tensor], Any]] = {
    "attention": lambda net, x: net.attention(x, x, x)[0],
    "causal attention": lambda net, x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "a convolution": lambda net, x: net.convolution(x.transpose(1, 2)).transpose(1, 2),
    "recurrence": lambda net, x: net.recurrent(x)[0],
    "the mean of a row": lambda net, x: x - x.mean(1, keepdim=True),
    "the last token": lambda net, x: x - x[:, -1:],
    "pooling": lambda net, x: x.mean(1),
    "positions": lambda net, x: x + torch.arange(x.shape[1], dtype=x.dtype)[:, None],
}


def refused(function: Callable[[Applies, Tensor], Any], training: bool, **size: int) -> str:
    net = Applies(function).train(training)
    x = torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    state, generators = {key: value.clone() for key, value in net.state_dict().items()}, Generators()
    kept = {key: value for key, value in vars(net).items() if key != "forward"}
    undo = checkpoint_chunks(net, **size)
    with pytest.raises(ChunkError) as error:
        net(x)
    undo()
    assert generators.stand_as_now()
    assert {key: value for key, value in vars(net).items() if key != "forward"} == kept
    assert net.seen == []
    assert (net.meter.count, list(net.recent), net.deep) == (0, [0.5], {"sizes": [{0}]})
    assert not net.counts.any()
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
    assert [part.training for part in net.modules()] == [training] * len(list(net.modules()))
    return str(error.value)


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("name", COUPLED)
def test_rows_that_act_on_each_other_are_refused(name: str, size: int) -> None:
    assert "rows" in refused(COUPLED[name], True, rows=size)
    assert "rows" in refused(COUPLED[name], False, rows=size)


@pytest.mark.parametrize("name", OVER_TOKENS)
def test_tokens_that_act_on_each_other_are_refused(name: str) -> None:
    for size in (1, 7):
        assert "tokens" in refused(OVER_TOKENS[name], True, tokens=size)
        assert "tokens" in refused(OVER_TOKENS[name], False, tokens=size)


@pytest.mark.parametrize("name", WRITING)
def test_a_forward_that_writes_is_refused_by_the_name_of_what_it_writes(name: str) -> None:
    assert repr(name) in refused(WRITING[name], True, rows=5)


def test_batch_norm_in_eval_mode_runs_in_chunks() -> None:
    net = Applies(WRITING["norm.num_batches_tracked"]).eval()
    x = torch.randn(ROWS, TOKENS, WIDTH)
    plain = net(x)
    checkpoint_chunks(net, rows=5)
    assert torch.allclose(net(x), plain, atol=1e-6)


def test_rows_that_are_all_alike_prove_nothing_for_the_next_batch() -> None:
    net = Applies(lambda net, x: x - 0.1 * x.amax(0)).eval()
    checkpoint_chunks(net, rows=5)
    net(torch.ones(ROWS, TOKENS, WIDTH))  # here it makes no difference
    with pytest.raises(ChunkError, match="rows"):
        net(torch.randn(ROWS, TOKENS, WIDTH))


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "3"])
def test_sizes_are_whole_numbers_from_one(size: Any) -> None:
    with pytest.raises(ValueError, match=r"rows=.* in a chunk; give a whole number from 1"):
        checkpoint_chunks(nn.Linear(2, 2), rows=size)


def test_a_size_has_to_be_given_and_a_module_is_chunked_once() -> None:
    with pytest.raises(ValueError, match="No size of a chunk is given"):
        checkpoint_chunks(nn.Linear(2, 2))
    layer = nn.Linear(2, 2)
    undo = checkpoint_chunks(layer, rows=2)
    with pytest.raises(ValueError, match="Linear runs in chunks already"):
        checkpoint_chunks(layer, rows=2)
    undo()
    checkpoint_chunks(layer, rows=2)()
    assert "forward" not in vars(layer)


def test_a_tensor_with_a_graph_of_its_own_has_to_be_an_argument() -> None:
    class Reads(nn.Module):
        memory: Tensor

        def forward(self, x: Tensor) -> Tensor:
            return x * self.memory

    net, weight = Reads(), torch.ones(WIDTH, requires_grad=True)
    net.memory = weight.exp()
    checkpoint_chunks(net, rows=3)
    with pytest.raises(ChunkError, match="computed before its forward"):
        net(torch.randn(ROWS, WIDTH))


def test_a_parameter_that_is_read_by_a_later_backward_only_is_not_lost_in_silence() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * extra if torch.is_grad_enabled() and seen else x * 2

    extra, seen = torch.ones(WIDTH, requires_grad=True), []
    net = Reads()
    checkpoint_chunks(net, rows=3)
    out = net(torch.randn(ROWS, WIDTH, requires_grad=True))
    seen.append(True)
    with pytest.raises(ChunkError, match="did not read when it was checked"):
        out.sum().backward()


def test_a_cache_of_keys_is_refused() -> None:
    from transformers import DynamicCache

    class Caches(nn.Module):
        def forward(self, x: Tensor, cache: Any) -> Tensor:
            return x

    net = Caches()
    checkpoint_chunks(net, rows=2)
    with pytest.raises(ChunkError, match=r"DynamicCache.*use_cache=False"):
        net(torch.randn(5, 3), DynamicCache())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_coupling_below_the_rounding_of_16_bits_is_seen(dtype: torch.dtype) -> None:
    net = Applies(lambda net, x: x + 2e-3 * x.mean(0)).to(dtype)
    checkpoint_chunks(net, rows=5)
    with pytest.raises(ChunkError, match="rows"):
        net(torch.randn(ROWS, TOKENS, WIDTH).to(dtype))
    assert {one.dtype for one in net.parameters()} == {dtype}
    assert torch.get_default_dtype() == torch.float32


class ByFrequency(nn.Module):
    """The gradient of a row depends on how often others have its id."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 6, scale_grad_by_freq=True)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(self.table(ids))


def clipped(module: nn.Module, _: Any, grads: Any) -> Any:
    return tuple(grad / grad.norm() for grad in grads)


class Injected(torch.autograd.Function):
    """Hands its input on; an auxiliary loss gets its gradient in the backward, as routers of experts do it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, auxiliary: Tensor) -> Tensor:
        ctx.save_for_backward(auxiliary)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (auxiliary,) = ctx.saved_tensors
        return grad, torch.ones_like(auxiliary)


class Router(nn.Module):
    """Its auxiliary loss is a product of two means over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.choose, self.net = nn.Linear(6, 4), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.choose(x).softmax(-1)
        return Injected.apply(self.net(x), (shares.mean(0) * shares.square().mean(0)).sum())


def test_an_auxiliary_loss_that_is_injected_in_the_backward() -> None:
    router = Router().double()
    checkpoint_chunks(router, rows=4)
    with pytest.raises(ChunkError, match="gradients are not the sum of those of its rows"):
        router(torch.randn(20, 6, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_of_which_the_rows_gradients_are_no_summands(dtype: torch.dtype) -> None:
    by_frequency = ByFrequency().to(dtype)
    checkpoint_chunks(by_frequency, rows=4)
    with pytest.raises(ChunkError, match="gradients are not the sum of those of its rows"):
        by_frequency(torch.arange(20))
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    net[1].register_full_backward_hook(clipped)
    checkpoint_chunks(net, rows=4)
    with pytest.raises(ChunkError, match="gradients are not the sum of those of its rows"):
        net(torch.randn(20, 6, dtype=dtype))


@pytest.mark.parametrize(
    "hook", [lambda grad: grad * 2, lambda grad: grad.clamp(-0.01, 0.01), lambda grad: grad / grad.norm()]
)
def test_hooks_of_weights_get_the_gradient_of_all_rows_once(hook: Any) -> None:
    gradients = []
    x = torch.randn(20, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for rows in (None, 3):
        torch.manual_seed(0)
        net, calls = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double(), list[Tensor]()
        for weight in net.parameters():
            weight.register_hook(calls.append)
            weight.register_hook(hook)
        if rows is not None:
            checkpoint_chunks(net, rows=rows)
        net(x).square().sum().backward()
        assert len(calls) == 4
        gradients.append([weight.grad for weight in net.parameters()])
    for plain, chunked in zip(*gradients, strict=True):
        assert torch.allclose(plain, chunked, rtol=1e-12, atol=1e-14)

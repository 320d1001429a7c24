"""What modules take and give, and what surrounds them: in chunks as without."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_memkit.activations.chunks.checkpoint_chunks import checkpoint_chunks

ROWS, TOKENS, WIDTH = 7, 5, 6
Outputs = dict[str, Tensor]


class Nested(nn.Module):
    """Takes nested arguments by position and name, a table for all rows, masks and numbers; gives several outputs."""

    def __init__(self, is_flat: bool) -> None:
        super().__init__()
        self.is_flat = is_flat  # one output has rows and tokens in one dimension
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.layer.weight  # shared

    def forward(
        self, given: dict[str, Any], times: float, *, table: Tensor, mask: Tensor | None = None
    ) -> Any:
        x, other = given["pair"]
        hidden = self.frozen(self.layer(x)).tanh() + table + other
        if mask is not None:
            hidden = torch.where(mask[..., None], hidden, 0.0)
        out = self.head(hidden) * times
        return {
            "out": (out, out.argmax(-1)),
            "flat": out.flatten(0, 1) if self.is_flat else out + 1,
            "scale": self.scale.exp(),
            "name": "nested",
            "nothing": None,
            "detached": hidden.detach(),
        }


def arguments(requires_grad: bool) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x, other = torch.randn(2, ROWS, TOKENS, WIDTH, generator=generator, dtype=torch.float64).unbind()
    table = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    mask = torch.rand(ROWS, TOKENS, generator=generator) > 0.3
    leaves = [one.requires_grad_(requires_grad) for one in (x.clone(), table)]
    return ({"pair": [leaves[0], other]}, 1.5), {"table": leaves[1], "mask": mask}, leaves


def nested_results(sizes: dict[str, int], requires_grad: bool, times: int, is_flat: bool) -> Outputs:
    torch.manual_seed(0)
    net = Nested(is_flat).double()
    if sizes:
        checkpoint_chunks(net, **sizes)
    args, kwargs, leaves = arguments(requires_grad)
    results: Outputs = {}
    for _ in range(times):
        out = net(*args, **kwargs)
        assert out["name"] == "nested"
        assert out["nothing"] is None
        assert not out["out"][1].requires_grad
        assert not out["detached"].requires_grad
        loss = out["out"][0].square().mean() * out["scale"] + out["flat"].sin().sum()
        loss.backward()
        results |= {"out": out["out"][0], "best": out["out"][1], "flat": out["flat"], "scale": out["scale"]}
    results |= {name: one.grad for name, one in net.named_parameters() if one.grad is not None}
    results |= {f"input {index}": one.grad for index, one in enumerate(leaves) if one.grad is not None}
    return {name: value.detach() for name, value in results.items()}


@pytest.mark.parametrize("times", [1, 2], ids=["one step", "accumulated"])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "sizes", [{"rows": 1}, {"rows": 3}, {"tokens": 2}, {"rows": 3, "tokens": 2}], ids=str
)
def test_nested_arguments_and_outputs(sizes: dict[str, int], requires_grad: bool, times: int) -> None:
    is_flat = "tokens" not in sizes
    plain = nested_results({}, requires_grad, times, is_flat)
    chunked = nested_results(sizes, requires_grad, times, is_flat)
    assert plain.keys() == chunked.keys()
    assert "unused.weight" not in plain
    for name, value in plain.items():
        assert chunked[name].dtype == value.dtype
        assert torch.allclose(chunked[name].double(), value.double(), rtol=1e-12, atol=1e-12), name


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.5), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def by_hand(net: nn.Module, x: Tensor, bounds: list[int]) -> Tensor:
    """Chunks whose activations are kept."""
    return torch.cat([net(x[begin:end]) for begin, end in zip(bounds, bounds[1:], strict=False)])


def gradients(net: nn.Module, out: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out.float().square().sum(), list(net.parameters())))


def test_dropout_drops_the_same_in_the_recomputation() -> None:
    net, x = Dropped(), torch.randn(ROWS, WIDTH)
    torch.manual_seed(4)
    plain = by_hand(net, x, [0, 2, 4, 7])
    expected, after = gradients(net, plain), torch.rand(3)
    checkpoint_chunks(net, rows=3)
    net(x)  # its check draws nothing that is seen
    torch.manual_seed(4)
    out = net(x)
    assert torch.equal(out, plain)
    torch.rand(100)  # the loss may draw, too
    state = torch.get_rng_state()
    found = gradients(net, out)
    assert torch.equal(torch.get_rng_state(), state)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    torch.manual_seed(4)
    net(x)
    assert torch.equal(torch.rand(3), after)


@pytest.mark.parametrize("inside", [True, False], ids=["backward within autocast", "backward outside"])
def test_autocast_is_that_of_the_forward(inside: bool) -> None:
    net, x = Dropped().eval(), torch.randn(ROWS, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        plain = by_hand(net, x, [0, 2, 4, 7])
        expected = gradients(net, plain)
    undo = checkpoint_chunks(net, rows=3)
    with torch.autocast("cpu", torch.bfloat16):
        out = net(x)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, plain)
        found = gradients(net, out) if inside else None
        undo()
        again = gradients(net, net(x))  # a weight that was cast without gradient must not be found again
        assert all(bool(one.any()) for one in again)
    found = found or gradients(net, out)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert torch.allclose(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))


def test_gradients_of_bfloat16_weights_are_summed_in_float32() -> None:
    rows = 256
    torch.manual_seed(0)
    net, x = nn.Linear(WIDTH, WIDTH).bfloat16(), torch.randn(rows, WIDTH).bfloat16() + 1
    exact = copy.deepcopy(net).double()
    (wanted,) = torch.autograd.grad(exact(x.double()).sum(), exact.weight)
    whole = torch.autograd.grad(net(x).sum(), net.weight)[0].double()
    checkpoint_chunks(net, rows=1)
    (found,) = torch.autograd.grad(net(x).sum(), net.weight)
    assert found.dtype == torch.bfloat16
    assert float((found.double() - wanted).abs().max()) <= 1.01 * float((whole - wanted).abs().max()) + 1e-9


def test_a_module_used_twice_and_parameters_beyond_it() -> None:
    extra = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    class Closes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * extra

    net, x = Closes(), torch.randn(ROWS, WIDTH, dtype=torch.float64)
    sources = [*net.parameters(), extra]

    def found() -> list[Tensor]:
        return list(torch.autograd.grad((net(net(x).tanh()) * net(x + 1)).sum(), sources))

    plain = found()
    undo = checkpoint_chunks(net, rows=2)
    for one, other in zip(found(), plain, strict=True):
        assert torch.allclose(one, other, rtol=1e-12)
    undo()
    assert "forward" not in vars(net)
    for one, other in zip(found(), plain, strict=True):
        assert torch.equal(one, other)


def test_without_gradient_nothing_is_kept_and_results_are_the_same() -> None:
    net, x = Dropped().eval(), torch.randn(ROWS, WIDTH)
    plain = by_hand(net, x, [0, 2, 4, 7])
    lengths: list[int] = []
    net.net.register_forward_hook(lambda _, args, out: lengths.append(len(args[0])))
    checkpoint_chunks(net, rows=3)
    net(x)
    for context in (torch.no_grad(), torch.inference_mode()):
        lengths.clear()
        with context:
            out = net(x)
        assert lengths == [2, 2, 3]
        assert torch.equal(out, plain)
        assert out.grad_fn is None
    lengths.clear()
    net(x[:3])
    assert lengths == [3]  # one chunk runs as it is


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_the_first_call_of_all_may_be_without_gradient(context: Callable[[], Any]) -> None:
    """As a Trainer's validation before training is."""
    net, x = Dropped().eval(), torch.randn(ROWS, WIDTH)
    plain = copy.deepcopy(net)
    checkpoint_chunks(net, rows=3)
    with context():
        given = x.clone()  # of this context, too
        assert torch.allclose(net(given), plain(given), rtol=1e-5, atol=1e-6)
    net(x).square().sum().backward()
    plain(x).square().sum().backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_frozen_modules_give_no_gradient_and_thawed_ones_do() -> None:
    net, x = Dropped().eval().requires_grad_(False), torch.randn(ROWS, WIDTH)
    checkpoint_chunks(net, rows=3)
    assert not net(x).requires_grad
    inputs = x.clone().requires_grad_()
    net(inputs).sum().backward()
    assert inputs.grad is not None
    assert all(one.grad is None for one in net.parameters())
    net.requires_grad_(True)
    net(x).sum().backward()
    assert all(one.grad is not None for one in net.parameters())


def test_each_chunk_runs_twice_and_hooks_of_the_module_once() -> None:
    net, x = Dropped(), torch.randn(ROWS, WIDTH)
    checkpoint_chunks(net, rows=3)
    net(x)
    inner, outer = [], []
    net.net.register_forward_hook(lambda *_: inner.append(1))
    net.register_forward_hook(lambda *_: outer.append(1))
    out = net(x)
    assert len(inner) == 3
    out.sum().backward(retain_graph=True)
    assert len(inner) == 6
    out.sum().backward()
    assert len(inner) == 9
    assert len(outer) == 1


def test_copies_and_pickles() -> None:
    net, x = Dropped().eval(), torch.randn(ROWS, WIDTH)
    checkpoint_chunks(net, rows=3)
    net(x)
    copied = copy.deepcopy(net)
    copied(x).sum().backward()
    assert all(one.grad is not None for one in copied.parameters())
    assert all(one.grad is None for one in net.parameters())
    assert torch.allclose(pickle.loads(pickle.dumps(net))(x), net(x), atol=1e-6)


def test_activation_checkpointing_and_the_compiler_within_a_chunk() -> None:
    class Within(nn.Module):
        def __init__(self, wrapped: Callable[[Any, Tensor], Tensor]) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)).double()
            self.compiled: Any = torch.compile(self.net, backend="aot_eager")
            self.wrapped = wrapped

        def forward(self, x: Tensor) -> Tensor:
            return self.wrapped(self, x)

    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    plain = Within(lambda net, x: net.net(x))
    expected = gradients(plain.net, plain(x))
    for wrapped in (
        lambda net, x: checkpoint(net.net, x, use_reentrant=False),
        lambda net, x: net.compiled(x),
    ):
        net = Within(wrapped)
        checkpoint_chunks(net, rows=3)
        for one, other in zip(gradients(net.net, net(x)), expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_second_derivative_is_refused() -> None:
    net, x = Dropped(), torch.randn(ROWS, WIDTH, requires_grad=True)
    checkpoint_chunks(net, rows=3)
    with pytest.raises(ValueError, match="no second derivative"):
        torch.autograd.grad(net(x).sum(), x, create_graph=True)


def test_an_argument_written_before_the_backward_is_noticed() -> None:
    net, x = Dropped(), torch.randn(ROWS, WIDTH)
    checkpoint_chunks(net, rows=3)
    out = net(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@dataclass
class Given:
    x: Tensor


def test_an_argument_that_can_not_be_split_is_named() -> None:
    class Takes(nn.Module):
        def forward(self, given: Given, x: Tensor) -> Tensor:
            return F.relu(given.x + x)

    net, x = Takes(), torch.randn(ROWS, WIDTH)
    checkpoint_chunks(net, rows=3)
    with pytest.raises(ValueError, match="gets a Given as"):
        net(Given(x), x)


def test_a_weight_written_before_the_backward_is_noticed() -> None:
    net, x = Dropped(), torch.randn(ROWS, WIDTH)
    checkpoint_chunks(net, rows=3)
    out = net(x)
    with torch.no_grad():
        net.net[0].get_parameter("weight").zero_()
    with pytest.raises(RuntimeError, match=r"weight of shape \(16, 6\).*modified by an inplace operation"):
        out.sum().backward()


def test_activation_checkpointing_around_chunks() -> None:
    """It hands saved tensors back as others, parameters too."""
    net, x = Dropped().eval(), torch.randn(ROWS, WIDTH, requires_grad=True)
    sources = [x, *net.parameters()]

    def found() -> list[Tensor]:
        return list(torch.autograd.grad(checkpoint(net, x * 2, use_reentrant=False).square().sum(), sources))

    plain = found()
    checkpoint_chunks(net, rows=3)
    for one, other in zip(found(), plain, strict=True):
        assert torch.allclose(one, other, atol=1e-6)

"""Compensated steps of optimizers that know their parameters in ways of their own, against float32 masters."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adagrad, AdamW, Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_memkit.optim.compensation import compensate
from tests.optim.helpers import bf16_twins, set_gradients, trained_beside_masters

SHAPES = ((40, 30), (30,), (5, 7), (16, 3))
SMALL_BUCKETS = 16 * 50


class _Momentum(Optimizer):
    """Momentum whose buffers the subclasses keep in their own places."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.prepare()

    def parameters(self) -> Iterator[Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    def prepare(self) -> None: ...

    def buffer(self, index: int, p: Parameter) -> Tensor:
        raise NotImplementedError

    def rate(self, group: dict[str, Any], p: Parameter) -> float:
        return group["lr"]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        index = -1
        for group in self.param_groups:
            for p in group["params"]:
                index += 1
                if p.grad is None:
                    continue
                buffer = self.buffer(index, p)
                buffer.mul_(0.9).add_(p.grad)
                p.mul_(1 - 1e-3).sub_(buffer * self.rate(group, p))


class NestedDict(_Momentum):
    def prepare(self) -> None:
        for p in self.parameters():
            self.state[p]["h"] = {"m": torch.zeros_like(p)}

    def buffer(self, index: int, p: Parameter) -> Tensor:
        return self.state[p]["h"]["m"]


class Listed(_Momentum):
    def prepare(self) -> None:
        for p in self.parameters():
            self.state[p]["h"] = [0, [torch.zeros_like(p)]]

    def buffer(self, index: int, p: Parameter) -> Tensor:
        return self.state[p]["h"][1][0]


class Named(NamedTuple):
    m: Tensor
    count: int


class InTuple(_Momentum):
    def prepare(self) -> None:
        for p in self.parameters():
            self.state[p]["h"] = Named(torch.zeros_like(p), 0)

    def buffer(self, index: int, p: Parameter) -> Tensor:
        return self.state[p]["h"].m


@dataclass
class Held:
    m: Tensor


@dataclass(slots=True)
class HeldInSlots:
    m: Tensor


class InDataclass(_Momentum):
    def prepare(self) -> None:
        self.state = defaultdict(OrderedDict)
        for p in self.parameters():
            self.state[p]["h"] = Held(torch.zeros_like(p))

    def buffer(self, index: int, p: Parameter) -> Tensor:
        return self.state[p]["h"].m


class ListOfBuffers(_Momentum):
    def prepare(self) -> None:
        self.buffers = [torch.zeros_like(p) for p in self.parameters()]

    def buffer(self, index: int, p: Parameter) -> Tensor:
        return self.buffers[index]


class ListOfSlots(_Momentum):
    def prepare(self) -> None:
        self.held = tuple(HeldInSlots(torch.zeros_like(p)) for p in self.parameters())

    def buffer(self, index: int, p: Parameter) -> Tensor:
        return self.held[index].m


class ByParameter(_Momentum):
    def prepare(self) -> None:
        self.buffers = {p: torch.zeros_like(p) for p in self.parameters()}

    def buffer(self, index: int, p: Parameter) -> Tensor:
        return self.buffers[p]


class ById(_Momentum):
    def prepare(self) -> None:
        self.buffers = {id(p): torch.zeros_like(p) for p in self.parameters()}
        self.scales = {id(p): 1.0 + place for place, p in enumerate(self.parameters())}

    def buffer(self, index: int, p: Parameter) -> Tensor:
        return self.buffers[id(p)]

    def rate(self, group: dict[str, Any], p: Parameter) -> float:
        return group["lr"] / self.scales.get(id(p), 1e9)


class Weakly(_Momentum):
    def prepare(self) -> None:
        self.buffers = WeakTensorKeyDictionary()

    def buffer(self, index: int, p: Parameter) -> Tensor:
        if p not in self.buffers:
            self.buffers[p] = torch.zeros_like(p)
        return self.buffers[p]


class InGroups(_Momentum):
    def prepare(self) -> None:
        for group in self.param_groups:
            group["buffers"] = {p: torch.zeros_like(p) for p in group["params"]}

    def buffer(self, index: int, p: Parameter) -> Tensor:
        return next(group["buffers"][p] for group in self.param_groups if p in group["buffers"])


class Attributes(_Momentum):
    def prepare(self) -> None:
        for place, p in enumerate(self.parameters()):
            p.lr_scale = 1.0 / (place + 1)  # pyright: ignore[reportAttributeAccessIssue]
            p.momentum = torch.zeros_like(p)  # pyright: ignore[reportAttributeAccessIssue]

    def buffer(self, index: int, p: Parameter) -> Tensor:
        return p.momentum  # pyright: ignore[reportAttributeAccessIssue]

    def rate(self, group: dict[str, Any], p: Parameter) -> float:
        return group["lr"] * getattr(p, "lr_scale", 1.0)


class Closures(_Momentum):
    def prepare(self) -> None:
        buffers = {}
        self.decays = []
        for p in self.parameters():
            buffers[p] = torch.zeros_like(p)
            self.decays.append(lambda p=p: p.mul_(1 - 1e-3))
        self.lookup = lambda p: buffers[p]

    def buffer(self, index: int, p: Parameter) -> Tensor:
        self.decays[index]()
        return self.lookup(p)


class OneFlatBuffer(_Momentum):
    """Views of one tensor, which is scaled as one; counts its steps."""

    def prepare(self) -> None:
        count = sum(p.numel() for p in self.parameters())
        self.flat = torch.zeros(count, dtype=next(self.parameters()).dtype)
        self.views = [
            v.view_as(p)
            for v, p in zip(
                self.flat.split([p.numel() for p in self.parameters()]), self.parameters(), strict=True
            )
        ]
        self.steps = 0

    def buffer(self, index: int, p: Parameter) -> Tensor:
        if index == 0:
            self.steps += 1
            self.flat.mul_(1 - 1 / (10 + self.steps))
        return self.views[index]


class CopyOfTheWeights(_Momentum):
    """Schedule-free in kind: the gradient moves a copy made at the start, and the weights follow it."""

    def prepare(self) -> None:
        self.z = [p.detach().clone() for p in self.parameters()]

    def buffer(self, index: int, p: Parameter) -> Tensor:
        assert p.grad is not None
        p.lerp_(self.z[index].sub_(p.grad, alpha=1e-2), 0.3)
        return torch.zeros_like(p)


class KeepsGradients(_Momentum):
    """A history of gradients, as L-BFGS and Anderson acceleration keep."""

    def buffer(self, index: int, p: Parameter) -> Tensor:
        history = self.state[p].setdefault("history", [])
        history.append(p.grad)
        del history[:-3]
        return torch.stack(history).sum(0)


class Preconditioned(_Momentum):
    """A list of preconditioners a parameter, one a dimension."""

    def prepare(self) -> None:
        self.preconditioners = [[torch.eye(n, dtype=p.dtype) for n in p.shape] for p in self.parameters()]

    def buffer(self, index: int, p: Parameter) -> Tensor:
        assert p.grad is not None
        first = self.preconditioners[index][0]
        rows = p.grad.reshape(len(first), -1)
        first.mul_(0.99).addmm_(rows, rows.T, alpha=0.01)
        return (first @ rows).view_as(p)


class GlobalNorm(_Momentum):
    def buffer(self, index: int, p: Parameter) -> Tensor:
        norm = torch.stack([q.grad.norm() for q in self.parameters() if q.grad is not None]).norm()
        assert p.grad is not None
        return p.grad / norm


class Deriving(AdamW):
    """torch's own step, through a method that a subclass overrides."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-3, weight_decay=0.1)
        self.scales = {p: 1.0 + place for place, p in enumerate(self.param_groups[0]["params"])}

    def _init_group(self, group: Any, params: Any, grads: Any, *args: Any) -> Any:
        found = super()._init_group(group, params, grads, *args)
        grads[:] = [g * self.scales.get(p, 1.0) for p, g in zip(params, grads, strict=True)]
        return found


OWN = [
    NestedDict, Listed, InTuple, InDataclass, ListOfBuffers, ListOfSlots, ByParameter, ById, Weakly, InGroups,
    Attributes, Closures, OneFlatBuffer, CopyOfTheWeights, KeepsGradients, Preconditioned, Deriving,
]  # fmt: skip


def assert_bitwise(trained_weights: list[tuple[Parameter, Tensor, Parameter]]) -> None:
    for parameter, trained, master in trained_weights:
        assert torch.equal(trained.view(torch.int32), master.detach().view(torch.int32))
        assert not torch.equal(trained, parameter.detach().float())


@pytest.mark.parametrize("bucket_bytes", [None, SMALL_BUCKETS])
@pytest.mark.parametrize("optimizer_class", OWN)
def test_split_is_bitwise_an_fp32_master(
    optimizer_class: Callable[[Any], Optimizer], bucket_bytes: int | None
) -> None:
    assert_bitwise(trained_beside_masters(optimizer_class, SHAPES, steps=12, bucket_bytes=bucket_bytes))


def test_an_unknown_optimizer_sees_the_whole_model() -> None:
    assert_bitwise(trained_beside_masters(GlobalNorm, SHAPES, steps=5))


@pytest.mark.parametrize("bucket_bytes", [None, SMALL_BUCKETS])
def test_a_state_filled_with_an_option_holds_it_in_float32(bucket_bytes: int | None) -> None:
    assert_bitwise(
        trained_beside_masters(
            lambda groups: Adagrad(groups, lr=1e-2, initial_accumulator_value=0.1),
            SHAPES,
            steps=12,
            bucket_bytes=bucket_bytes,
        )
    )


def test_the_undo_makes_buffers_bfloat16_again() -> None:
    parameters, low_halves = bf16_twins([torch.randn(shape) for shape in SHAPES])
    optimizer = ListOfBuffers(parameters)
    handle = compensate(optimizer, low_halves=low_halves)
    assert {buffer.dtype for buffer in optimizer.buffers} == {torch.float32}
    handle.undo()
    assert {buffer.dtype for buffer in optimizer.buffers} == {torch.bfloat16}
    set_gradients(parameters, seed=0)
    optimizer.step()
    assert {p.dtype for p in parameters} == {torch.bfloat16}


def test_views_of_the_weights_are_named() -> None:
    class Views(_Momentum):
        def prepare(self) -> None:
            self.rows = [p.data for p in self.parameters()]

    parameters, _ = bf16_twins([torch.randn(shape) for shape in SHAPES])
    with pytest.warns(
        UserWarning, match=r"views of its bfloat16 weights' memory \(self.rows\[0\], self.rows\[1\]"
    ):
        compensate(Views(parameters))


def test_states_and_noise_go_through_a_state_dict() -> None:
    """A resumed run is bitwise the one that went on, with nested states."""
    runs = []
    for resumes in (False, True):
        torch.manual_seed(0)
        parameters, low_halves = bf16_twins([torch.randn(shape) for shape in SHAPES])
        optimizer = NestedDict(parameters)
        handle = compensate(optimizer, mode="split", states="exact", low_halves=low_halves)
        for seed in range(6):
            if seed == 3 and resumes:
                saved, values = optimizer.state_dict(), [p.detach().clone() for p in parameters]
                parameters, _ = bf16_twins([torch.zeros(shape) for shape in SHAPES])
                optimizer = NestedDict(parameters)
                handle = compensate(optimizer, mode="split", states="exact")
                optimizer.load_state_dict(saved)
                for p, value in zip(parameters, values, strict=True):
                    p.detach().copy_(value)
            set_gradients(parameters, seed)
            optimizer.step()
        runs.append([weight for _, weight in handle.float32_weights()])
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("mode", ["kahan", "split", "split24", "stochastic", "none"])
def test_compact_states_of_a_subclass_are_those_of_its_class(mode: Any) -> None:
    """Under their own identity parameters are stepped as on shadows: the same noise, the same roundings."""

    class Same(AdamW):
        def _init_group(self, *args: Any) -> Any:
            return super()._init_group(*args)

    weights = []
    for build in (AdamW, Same):
        torch.manual_seed(0)
        parameters, low_halves = bf16_twins([torch.randn(shape) for shape in SHAPES])
        optimizer = build(parameters, lr=1e-3, foreach=False)
        handle = compensate(optimizer, mode=mode, low_halves=low_halves)
        handle.engine.may_fuse = False
        for seed in range(4):
            set_gradients(parameters, seed)
            optimizer.step()
        assert optimizer.state[parameters[0]]["exp_avg_sq"].dtype == torch.bfloat16
        weights.append([weight for _, weight in handle.float32_weights()])
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)

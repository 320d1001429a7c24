"""What an optimizer keeps outside its state: in classes, iterators, modules, UserDicts, and on parameters."""

import collections
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memkit.initialization import cast_module
from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.journal import journal_steps
from lightning_memkit.optim.snapshots import restore_snapshot, take_snapshot
from lightning_memkit.testing import fail_at

SHAPES = [(4, 3), (4,), (2, 4)]


class Own(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.setup([p for group in self.param_groups for p in group["params"]])

    def setup(self, ps: list[Tensor]) -> None:
        pass

    def go(self, ps: list[Tensor]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.go([p for group in self.param_groups for p in group["params"]])

    def descend(self, ps: list[Tensor], rate: float | Tensor) -> None:
        for p in ps:
            assert p.grad is not None
            p.sub_(rate * p.grad * torch.ones_like(p))


class FromGenerator(Own):
    def setup(self, ps: list[Tensor]) -> None:
        self.rates = (0.1 * 0.8**i for i in itertools.count())

    def go(self, ps: list[Tensor]) -> None:
        self.descend(ps, next(self.rates))


class InUserDict(Own):
    def setup(self, ps: list[Tensor]) -> None:
        self.kept: Any = collections.UserDict(n=0)

    def go(self, ps: list[Tensor]) -> None:
        self.kept["n"] += 1
        self.descend(ps, 0.1 / self.kept["n"])


class InClass(Own):
    n = 0

    def setup(self, ps: list[Tensor]) -> None:
        InClass.n = 0

    def go(self, ps: list[Tensor]) -> None:
        InClass.n += 1
        self.descend(ps, 0.1 / InClass.n)


class InModule(Own):
    def setup(self, ps: list[Tensor]) -> None:
        self.kept: Any = nn.Module()
        self.kept.register_buffer("n", torch.zeros(()))

    def go(self, ps: list[Tensor]) -> None:
        self.kept.n += 1
        self.descend(ps, 0.1 / self.kept.n)


class OnParameters(Own):
    def go(self, ps: list[Any]) -> None:
        for p in ps:
            if not hasattr(p, "momentum"):
                p.momentum = torch.zeros_like(p)
            p.momentum.mul_(0.9).add_(p.grad)
            p.sub_(0.05 * p.momentum)


class Drawing(Own):
    def go(self, ps: list[Tensor]) -> None:
        for p in ps:
            assert p.grad is not None
            p.sub_(0.05 * p.grad).add_(torch.randn_like(p), alpha=1e-2)


KINDS = [FromGenerator, InUserDict, InClass, InModule, OnParameters]


def made(kind: Callable[[Any], Optimizer]) -> tuple[list[Any], Optimizer]:
    generator = torch.Generator().manual_seed(0)
    ps = [nn.Parameter(torch.randn(s, generator=generator).double()) for s in SHAPES]
    torch.manual_seed(3)
    return ps, kind(ps)


def step(ps: list[Any], optimizer: Optimizer, t: int) -> None:
    generator = torch.Generator().manual_seed(100 + t)
    for p in ps:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_puts_it_back(kind: type[Own]) -> None:
    plain, optimizer = made(kind)
    for t in range(3):
        step(plain, optimizer, t)
    ps, optimizer = made(kind)
    step(ps, optimizer, 0)
    snapshot = take_snapshot(optimizer)
    for _ in range(2):
        step(ps, optimizer, 7)
        with torch.no_grad():
            restore_snapshot(optimizer, snapshot)
    for t in (1, 2):
        step(ps, optimizer, t)
    assert all(torch.equal(a, b) for a, b in zip(ps, plain, strict=True))


@pytest.mark.parametrize("point", [1, 3, 5, 8])
@pytest.mark.parametrize("kind", [*KINDS, Drawing])
def test_a_step_that_runs_out_of_memory_is_repeated_bitwise(kind: type[Own], point: int) -> None:
    plain, optimizer = made(kind)
    for t in range(3):
        step(plain, optimizer, t)
    ps, optimizer = made(kind)
    journal = journal_steps(optimizer)
    for t in range(3):
        if t != 1:
            step(ps, optimizer, t)
            continue
        with fail_at(point, armed=False) as faults:
            generator = torch.Generator().manual_seed(100 + t)
            for p in ps:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            faults.arm()
            optimizer.step()
            faults.disarm()
    assert all(torch.equal(a, b) for a, b in zip(ps, plain, strict=True))
    journal.undo()


class Momentum(Own):
    def buffers(self) -> Any:
        raise NotImplementedError

    def go(self, ps: list[Tensor]) -> None:
        for m, p in zip(self.buffers(), ps, strict=True):
            m.mul_(0.9).add_(p.grad)
            p.sub_(0.05 * m)


class MomentumInUserDict(Momentum):
    def setup(self, ps: list[Tensor]) -> None:
        self.m: Any = collections.UserDict({i: torch.zeros_like(p) for i, p in enumerate(ps)})

    def buffers(self) -> Any:
        return self.m.values()


class MomentumInModule(Momentum):
    def setup(self, ps: list[Tensor]) -> None:
        self.m = nn.Module()
        for i, p in enumerate(ps):
            self.m.register_buffer(f"b{i}", torch.zeros_like(p))

    def buffers(self) -> Any:
        return self.m.buffers()


class FloatStart(Own):
    def setup(self, ps: list[Tensor]) -> None:
        self.start = [p.detach().float().clone() for p in ps]

    def go(self, ps: list[Any]) -> None:
        for s, p in zip(self.start, ps, strict=True):
            p.sub_(0.1 * p.grad + 0.05 * (p - s))


class MasterWeights(Own):
    def setup(self, ps: list[Tensor]) -> None:
        self.m = [p.detach().clone().float() for p in ps]

    def go(self, ps: list[Any]) -> None:
        for m, p in zip(self.m, ps, strict=True):
            m.sub_(0.1 * p.grad.float())
            p.copy_(m)


def _net() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    net = nn.Module()
    net.ws = nn.ParameterList([nn.Parameter(torch.randn(s, generator=generator) * 0.3) for s in SHAPES])
    return net


@pytest.mark.parametrize("kind", [MomentumInUserDict, MomentumInModule, FloatStart, MasterWeights])
def test_what_is_made_of_bfloat16_weights_is_float32s(kind: type[Own]) -> None:
    def gradients(t: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(100 + t)
        return [(torch.randn(s, generator=generator) * 0.1).bfloat16() for s in SHAPES]

    plain, ours, low = _net(), _net(), {}
    optimizer = kind(plain.parameters())
    cast_module(ours, torch.bfloat16, low_halves=low)
    compensated = kind(ours.parameters())
    handle = compensate(compensated, mode="split", states="exact", low_halves=low)
    for t in range(5):
        for p, q, g in zip(plain.parameters(), ours.parameters(), gradients(t), strict=True):
            p.grad, q.grad = g.float(), g.clone()
        optimizer.step()
        compensated.step()
    trained = [weight for _, weight in handle.float32_weights()]
    assert all(torch.equal(a, b) for a, b in zip(trained, plain.parameters(), strict=True))

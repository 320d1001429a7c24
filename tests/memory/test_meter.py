from typing import Any

import pytest
import torch
from torch import nn

from lightning_memkit.memory.allocator_trace import AllocatorTrace
from lightning_memkit.memory.meter import ByteMeter


def test_counts_births_and_deaths_and_the_peak_between() -> None:
    with ByteMeter() as meter:
        a = torch.empty(1000)  # 4000 B
        b = a + 1  # 8000 B
        del a
        c = b.view(10, 100)  # no new storage
        del b
        d = c.double()  # 12000 B with c
        del c, d
    assert meter.peak_bytes == 12_000
    assert meter.live_bytes == 0
    assert meter.allocations == 3


def test_agrees_with_the_allocator_s_own_profile() -> None:
    """The oracle is torch's profiler, which records what the CPU allocator really hands out."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    inputs = torch.randn(128, 64)

    def step() -> None:
        model(inputs).square().mean().backward()
        model.zero_grad()

    step()
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        step()
    live = peak = 0
    results: Any = profile.profiler.kineto_results  # pyright: ignore[reportOptionalMemberAccess]
    for event in results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    with ByteMeter() as meter:
        step()
    assert meter.peak_bytes == pytest.approx(peak, rel=0.01)
    assert peak > 100_000


def test_gradients_that_meet_are_added_in_place_as_without_a_meter() -> None:
    """Under a dispatch mode autograd adds out of place; the peak is that of a run without one."""
    weight = torch.randn(256, 256, requires_grad=True)

    def step() -> None:
        x = weight * 2
        sum(x.sin() for _ in range(4)).sum().backward()  # pyright: ignore
        weight.grad = None

    def own_sum() -> None:
        class Doubles(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore
                return gradient.contiguous() + gradient.contiguous()  # this sum is no accumulation

        Doubles.apply(weight).sum().backward()  # pyright: ignore
        weight.grad = None

    for function in (step, own_sum):
        function()
        with AllocatorTrace() as trace:
            function()
        with ByteMeter() as meter:
            function()
        assert meter.peak_bytes == pytest.approx(trace.peak_bytes, abs=64)
        with ByteMeter(budget_bytes=meter.peak_bytes) as kept:
            function()
        assert kept.peak_bytes == meter.peak_bytes
        with (
            pytest.raises(torch.OutOfMemoryError, match="over the budget"),
            ByteMeter(budget_bytes=meter.peak_bytes - 1),
        ):
            function()
        weight.grad = None


def test_budget_is_the_peak_to_the_byte() -> None:
    def work() -> None:
        x = torch.ones(500, requires_grad=True)
        (x.exp() * x.sin()).sum().backward()

    with ByteMeter() as meter:
        work()
    with ByteMeter(budget_bytes=meter.peak_bytes) as kept:
        work()
    assert kept.peak_bytes == meter.peak_bytes
    with (
        pytest.raises(torch.OutOfMemoryError, match="over the budget"),
        ByteMeter(budget_bytes=meter.peak_bytes - 1),
    ):
        work()


def test_a_budget_holds_after_it_was_passed_too() -> None:
    with ByteMeter(budget_bytes=800) as meter:
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(1000)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(300)
        kept = torch.zeros(200)
        kept.add_(1)
    assert meter.peak_bytes == 4000


def test_every_allocation_can_be_made_to_fail() -> None:
    def work() -> None:
        x = torch.ones(8, requires_grad=True)
        x.exp().sum().backward()

    with ByteMeter() as meter:
        work()
    for index in range(meter.allocations):
        with pytest.raises(torch.OutOfMemoryError, match=f"Allocation {index} "), ByteMeter(fail_at=index):
            work()
    with ByteMeter(fail_at=meter.allocations):
        work()


def test_tracked_tensors_count_once_and_go_when_they_die() -> None:
    weight = torch.zeros(100)
    meter = ByteMeter()
    meter.track([weight, weight.view(10, 10)], "weights")
    assert meter.live_bytes == 400
    del weight
    assert meter.live_bytes == 0


def test_a_function_that_was_metered_runs_compiled_again_afterwards():
    calls = []

    def backend(graph, inputs):
        def run(*args):
            calls.append(len(args))
            return graph.forward(*args)

        return run

    compiled = torch.compile(lambda x: x.sin() + 1, backend=backend)
    x = torch.ones(8)
    with ByteMeter() as meter:
        compiled(x)
    assert meter.operators >= 2  # each of its operators was seen
    assert not calls
    compiled(x)
    assert calls

"""Faults on purpose: each fires where it is told to, once, and leaves everything else alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_memkit.testing import Fault, Outcome, byte_budget, count_allocations, fail_at, sweep
from tests.testing.fake_device import fake_device
from tests.testing.needs import NEEDS_COMPILER


def chain() -> Tensor:
    """Three allocations: ones, exp, sin."""
    return torch.ones(8).exp().sin()


def survive(work=chain) -> int:
    """How many tries it takes."""
    for tries in range(1, 20):
        try:
            work()
        except torch.OutOfMemoryError:
            continue
        return tries
    raise AssertionError("never came through")


def test_the_nth_allocation_fails_and_only_that() -> None:
    for point, operator in enumerate(("aten.ones.default", "aten.exp.default", "aten.sin.default")):
        with fail_at(point) as faults:
            with pytest.raises(torch.OutOfMemoryError, match=f"Allocation {point} "):
                chain()
            assert faults.fault == Fault(point=point, operator=operator)
            assert survive() == 1  # it fires once, so a retry goes on
            assert faults.allocations == point + 1 + 3
    with fail_at(3) as faults:
        chain()
    assert faults.fault is None


def test_updates_in_place_and_views_are_no_allocations() -> None:
    x = torch.ones(4, 4)
    with count_allocations() as counted:
        x.mul_(2).view(16).t().zero_()
    assert counted.allocations == 0


def test_counted_are_the_allocations_that_torch_s_profiler_sees() -> None:
    """The oracle is the CPU allocator's own record."""
    x = torch.ones(64, requires_grad=True)

    def work() -> None:
        x.exp().sin().sum().backward()
        x.grad = None

    work()
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        work()
    results: Any = profile.profiler.kineto_results  # pyright: ignore[reportOptionalMemberAccess]
    births = sum(event.name() == "[memory]" and event.nbytes() > 0 for event in results.events())
    with count_allocations() as counted:
        work()
    assert counted.allocations == births


def test_repeated_faults_go_on_until_disarmed() -> None:
    with fail_at(1, repeat=True) as faults:
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                chain()
        faults.disarm()
        assert survive() == 1
        faults.arm()
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(1)


def test_only_what_happens_while_armed_counts() -> None:
    with fail_at(1, armed=False) as faults:
        chain()
        assert faults.allocations == 0
        faults.arm()
        torch.ones(1)
        faults.disarm()
        chain()
        faults.arm()
        with pytest.raises(torch.OutOfMemoryError, match="Allocation 1 "):
            torch.ones(1)
        assert survive() == 1


def test_a_predicate_picks_the_step() -> None:
    step = 0
    failed = []
    with fail_at(2, when=lambda: step == 3) as faults:
        for step in range(6):  # noqa: B007
            try:
                chain()
            except torch.OutOfMemoryError:
                failed.append(step)
    assert failed == [3]
    assert faults.allocations == 3


@pytest.mark.parametrize(("rank", "tries"), [("1", 2), ("0", 1)])
def test_other_ranks_count_but_do_not_fail(rank, tries, monkeypatch) -> None:
    monkeypatch.setenv("RANK", rank)
    with fail_at(2, ranks=[1]) as faults:
        assert survive() == tries
    assert faults.allocations == 3 * tries
    assert (faults.fault is None) is (rank == "0")
    with byte_budget(40, ranks=[1]), pytest.raises(AssertionError) if rank == "1" else fail_at(99):
        survive()


def test_faults_reach_the_backward_and_its_recomputation() -> None:
    x = torch.ones(8, requires_grad=True)

    def work() -> None:
        y = checkpoint(lambda x: x.exp().tanh(), x, use_reentrant=False)
        y.sum().backward()  # pyright: ignore[reportOptionalMemberAccess]

    operators = [outcome.fault.operator for outcome in sweep(lambda _: work()) if outcome.fault]
    assert operators.count("aten.exp.default") == 2  # the second is the recomputation's
    assert "aten.tanh_backward.default" in operators


def test_a_budget_holds_in_a_retry_too() -> None:
    def work(size: int) -> None:
        with pytest.raises(torch.OutOfMemoryError, match="over the budget of 800 B") as caught:
            torch.ones(size)
        del caught

    with byte_budget(800) as budget:
        work(1000)
        work(300)  # less than the failed one's peak, and still over the budget
        torch.ones(200)
        kept = torch.ones(150)
        budget.disarm()
        torch.ones(1000)
        budget.arm()
        work(51)
        kept.mul_(2)
        torch.ones(50)
    resident = torch.ones(100)
    with byte_budget("1KiB", resident=[resident]) as budget:
        torch.ones(156)
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(157)
    assert budget.fault == Fault(point=1, operator="aten.ones.default")


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="n=-1 is below zero"):
        fail_at(-1)
    with pytest.raises(ValueError, match="not a size"):
        byte_budget(0)


# The sweep


def recovering(faults) -> tuple[int, Tensor]:
    """A run that survives one fault, with its result."""
    return survive(), chain()


def test_a_sweep_fails_every_allocation_once() -> None:
    outcomes = list(sweep(recovering))
    assert [outcome.point for outcome in outcomes] == list(range(6))
    # The first three fall into what is retried; the others end the run.
    assert [outcome.recovered for outcome in outcomes] == [True] * 3 + [False] * 3
    for outcome in outcomes:
        assert outcome.points == 6
        assert outcome.fault is not None
        assert outcome.leaked_bytes == (0 if outcome.recovered else -32)  # the result it did not come to
        assert outcome.expected[0] == 1
        if outcome.result is not None:
            assert outcome.result[0] == 2
            assert torch.equal(outcome.result[1], outcome.expected[1])
        else:
            assert isinstance(outcome.error, torch.OutOfMemoryError)
            assert outcome.error.__traceback__ is None


def test_a_sweep_sees_what_leaks() -> None:
    kept = []

    def leaks(faults) -> None:
        try:
            chain()
        except torch.OutOfMemoryError:
            kept.append(torch.ones(25))

    assert {outcome.leaked_bytes for outcome in sweep(leaks)} == {100}

    def cycle(faults) -> None:
        try:
            chain()
        except torch.OutOfMemoryError:
            holder: list = [torch.ones(25)]
            holder.append(holder)

    assert {outcome.leaked_bytes for outcome in sweep(cycle)} == {0}


def test_a_sweep_takes_the_points_and_the_phase_it_is_told() -> None:
    def run(faults) -> int:
        chain()
        faults.arm()
        tries = survive()
        faults.disarm()
        chain()
        return tries

    outcomes = list(sweep(run, armed=False, points=lambda count: range(0, count, 2)))
    assert [(outcome.point, outcome.points, outcome.result) for outcome in outcomes] == [(0, 3, 2), (2, 3, 2)]


def test_a_fault_that_is_not_reached_is_no_recovery() -> None:
    turns = iter((True, False, False, False))
    outcomes: list[Outcome] = list(sweep(lambda _: chain() if next(turns) else None))
    assert [(outcome.fault, outcome.recovered) for outcome in outcomes] == [(None, False)] * 3


def test_errors_of_other_kinds_are_outcomes_too() -> None:
    def run(faults) -> None:
        try:
            chain()
        except torch.OutOfMemoryError as error:
            raise KeyError("exp_avg") from error

    for outcome in sweep(run):
        assert isinstance(outcome.error, KeyError)
        assert isinstance(outcome.error.__cause__, torch.OutOfMemoryError)
        assert outcome.leaked_bytes == 0


# The fake device's allocator


@NEEDS_COMPILER
def test_a_device_s_own_allocator_fails_and_nothing_else_of_it_changes() -> None:
    with fake_device(budget_bytes=10_000) as device:

        def run(faults) -> int:
            x = torch.ones(8, device="fake", requires_grad=True)
            faults.arm()
            tries = survive(lambda: (x.exp() * x.sin()).sum().backward())
            faults.disarm()
            x.exp()
            return tries

        outcomes = list(sweep(run, on=device, armed=False))
        assert len(outcomes) >= 8  # forward and backward; autograd works in the device's thread
        for outcome in outcomes:
            assert outcome.recovered
            assert outcome.result == 2
            assert outcome.leaked_bytes == 0
        operators = [outcome.fault.operator for outcome in outcomes if outcome.fault]
        assert operators[0] == "aten.exp.default"
        assert "aten.cos.default" in operators
        assert device.budget_bytes == 10_000


@NEEDS_COMPILER
def test_a_device_s_faults_repeat_until_disarmed_and_stay_on_their_ranks(monkeypatch) -> None:
    with fake_device() as device:
        with fail_at(1, on=device, repeat=True) as faults:
            torch.ones(1, device="fake")
            for _ in range(3):
                with pytest.raises(torch.OutOfMemoryError):
                    torch.ones(1, device="fake")
            faults.disarm()
            torch.ones(1, device="fake")
            assert faults.allocations == 4
        monkeypatch.setenv("RANK", "0")
        with fail_at(0, on=device, ranks=[1]) as faults:
            torch.ones(1, device="fake")
        assert faults.allocations == 1
        assert faults.fault is None
        with fail_at(0, on=device):
            pass
        torch.ones(1, device="fake")  # the limit ended with its context
        with pytest.raises(ValueError, match="operator by operator"):
            fail_at(0, on=device, when=lambda: True)


@NEEDS_COMPILER
def test_both_kinds_see_the_same_step() -> None:
    """An oracle for each other: operators' outputs on the device are calls of its allocator."""
    with fake_device() as device:
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to("fake")
        batch = torch.ones(4, 8, device="fake")
        model(batch).sum().backward()
        with count_allocations() as operators, count_allocations(on=device) as calls:
            model(batch).exp()
        assert operators.allocations == calls.allocations == 4

"""How many workers: against a simulated loop whose times follow from first principles."""

import math
from dataclasses import replace
from multiprocessing import get_context
from types import SimpleNamespace

import pytest

from lightning_memkit.data.loading import loader_tuning
from lightning_memkit.data.loading.host_memory import HostMemory
from lightning_memkit.data.loading.load_times import Measured
from lightning_memkit.data.loading.loader_tuning import (
    Bounds,
    LoaderPlan,
    LoaderTuning,
    of_all_ranks,
    start_costs,
    wanted_plan,
    why_no_workers,
)

MUCH = HostMemory(shared_bytes=2**40, ram_bytes=2**40)
BOUNDS = Bounds(processors=16.0, room=MUCH)
PLENTY = 10_000


def times(load: float, step: float, wait: float | None = None, **others: float) -> Measured:
    """Of building in the training process, unless it waited for less."""
    return Measured(
        **{
            "batches": 8,
            "wait_seconds": load if wait is None else wait,
            "step_seconds": step,
            "load_seconds": load,
            "longest_load_seconds": load,
            "load_processors": 1.0,
            "step_processors": 1.0,
            **others,
        }  # pyright: ignore[reportArgumentType]
    )


def simulated(plan: LoaderPlan, load: float, step: float, overhead: float = 0.0, **others: float) -> Measured:
    """Workers that share the loading evenly; carrying a batch over takes the training process `overhead`."""
    if not plan.num_workers:
        return times(load, step, **others)
    return times(load, step, overhead + max(0.0, load / plan.num_workers - step), **others)


def settled(load: float, step: float, bounds: Bounds = BOUNDS, begin=LoaderPlan(), rounds=12, **others):  # noqa: B008
    """The plan after so many revisions, and how often it changed."""
    tuning, changes = LoaderTuning(begin), 0
    for _ in range(rounds):
        measured = simulated(tuning.plan, load, step, **others)
        changes += tuning.revise(measured, bounds, PLENTY, between_epochs=False)
    return tuning.plan, changes


@pytest.mark.parametrize(
    ("load", "step", "workers"),
    [(0.001, 0.1, 0), (0.002, 0.1, 0), (0.003, 0.1, 1), (0.069, 0.1, 1), (0.071, 0.1, 2), (0.15, 0.06, 4)],
)
def test_the_fewest_workers_that_are_busy_for_seven_tenths(load, step, workers):
    assert wanted_plan(times(load, step), BOUNDS, 0.02).num_workers == workers
    assert settled(load, step) == (LoaderPlan(num_workers=workers), int(workers > 0))
    if workers:
        assert load / workers <= 0.7 * step
        assert workers == 1 or load / (workers - 1) > 0.7 * step


@pytest.mark.parametrize(
    ("processors", "load_processors", "step_processors", "workers"),
    [
        (16, 1.0, 1.0, 15),
        (4, 1.0, 1.0, 3),
        (4, 0.5, 1.0, 6),
        (4, 0.01, 1.0, 24),
        (2, 1.0, 1.0, 1),
        (2, 1.0, 2.0, 1),
        (1, 1.0, 1.0, 1),
    ],
)
def test_workers_take_the_processors_that_training_leaves(
    processors, load_processors, step_processors, workers
):
    measured = times(3.0, 0.1, load_processors=load_processors, step_processors=step_processors)
    bounds = replace(BOUNDS, processors=float(processors))
    assert wanted_plan(measured, bounds, 0.02).num_workers == workers


def test_the_users_limit_holds():
    assert wanted_plan(times(3.0, 0.1), replace(BOUNDS, most_workers=3), 0.02).num_workers == 3
    assert wanted_plan(times(3.0, 0.1), replace(BOUNDS, most_workers=0), 0.02) == LoaderPlan()


@pytest.mark.parametrize(
    ("shared", "ram", "plan"),
    [
        (9, 100, LoaderPlan(num_workers=4, prefetch=2)),
        (8, 100, LoaderPlan(num_workers=4, prefetch=1)),
        (4, 100, LoaderPlan(num_workers=3, prefetch=1)),
        (1, 100, LoaderPlan()),
        (9, 9 + 4 * 3, LoaderPlan(num_workers=4, prefetch=2)),
        (9, 9 + 4 * 3 - 1, LoaderPlan(num_workers=4, prefetch=1)),
    ],
)
def test_memory_takes_prefetch_first_and_workers_then(shared, ram, plan):
    room = HostMemory(shared_bytes=shared, ram_bytes=ram)
    bounds = replace(BOUNDS, room=room, batch_bytes=1, worker_bytes=1)
    assert wanted_plan(times(0.25, 0.1), bounds, 0.02) == plan


def test_one_long_batch_is_bridged_by_those_ahead():
    even, uneven = times(0.2, 0.1), times(0.2, 0.1, longest_load_seconds=0.9)
    assert wanted_plan(even, BOUNDS, 0.02) == LoaderPlan(num_workers=3, prefetch=2)
    plan = wanted_plan(uneven, BOUNDS, 0.02)
    assert plan == LoaderPlan(num_workers=3, prefetch=4)
    assert (plan.num_workers * plan.prefetch) * 0.1 >= 0.9


def test_workers_that_cost_more_than_they_save_are_given_back_and_not_tried_again():
    tuning, plans = LoaderTuning(LoaderPlan()), []
    for _ in range(8):
        measured = simulated(tuning.plan, 0.0001, 0.001, overhead=0.0004)
        tuning.revise(measured, BOUNDS, PLENTY, between_epochs=False)
        plans.append(tuning.plan.num_workers)
    assert plans == [1, 0, 0, 0, 0, 0, 0, 0]


def test_what_was_tried_under_another_load_is_tried_again():
    tuning = LoaderTuning(LoaderPlan())
    for _ in range(3):
        tuning.revise(simulated(tuning.plan, 0.0001, 0.001, 0.0004), BOUNDS, PLENTY, between_epochs=False)
    assert tuning.plan == LoaderPlan()
    tuning.revise(simulated(tuning.plan, 0.0006, 0.001, 0.0001), BOUNDS, PLENTY, between_epochs=False)
    assert tuning.plan.num_workers == 1


@pytest.mark.parametrize(("batches", "workers"), [(100, 2), (20, 0), (math.inf, 2)])
def test_starting_workers_must_pay_within_the_batches_to_come(batches, workers):
    tuning = LoaderTuning(LoaderPlan())
    bounds = replace(BOUNDS, start_seconds=4.0)
    tuning.revise(times(0.1, 0.1), bounds, batches, between_epochs=False)
    assert tuning.plan.num_workers == workers


def test_where_workers_starve_the_loop_although_they_should_do_they_build_further_ahead_then_are_more():
    tuning, plans = LoaderTuning(LoaderPlan(num_workers=2)), []
    for prefetch_wait in (0.05, 0.04, 0.03, 0.02, 0.0):
        tuning.revise(times(0.1, 0.1, prefetch_wait), BOUNDS, PLENTY, between_epochs=False)
        plans.append(tuning.plan)
    assert plans == [
        LoaderPlan(num_workers=2, prefetch=4),
        LoaderPlan(num_workers=2, prefetch=8),
        LoaderPlan(num_workers=3, prefetch=8),
        LoaderPlan(num_workers=4, prefetch=8),
        LoaderPlan(num_workers=4, prefetch=8),
    ]


@pytest.mark.parametrize(("between_epochs", "workers"), [(True, 2), (False, 8)])
def test_a_worker_too_many_is_given_up_between_epochs(between_epochs, workers):
    tuning = LoaderTuning(LoaderPlan(num_workers=8))
    tuning.revise(times(0.11, 0.1, 0.0), BOUNDS, PLENTY, between_epochs=between_epochs)
    assert tuning.plan.num_workers == workers


def test_a_loader_that_is_fast_alone_ends_without_workers_between_epochs():
    tuning = LoaderTuning(LoaderPlan(num_workers=4))
    tuning.revise(times(0.0001, 0.1, 0.0005), BOUNDS, PLENTY, between_epochs=True)
    assert tuning.plan == LoaderPlan()


def test_all_ranks_come_to_the_plan_of_the_slowest():
    ranks = [
        (times(0.1, 0.2), replace(BOUNDS, room=HostMemory(shared_bytes=5, ram_bytes=9), batch_bytes=1)),
        (
            times(0.3, 0.1, load_processors=0.5),
            replace(BOUNDS, processors=3.0, batch_bytes=2, most_workers=7),
        ),
    ]
    told = []
    for measured, bounds in ranks:
        of_all_ranks(measured, bounds, lambda values: told.append(values) or values)
    largest = [max(values) for values in zip(*told, strict=True)]
    agreed = [of_all_ranks(measured, bounds, lambda _: largest) for measured, bounds in ranks]
    assert agreed[0] == agreed[1]
    measured, bounds = agreed[0]
    assert measured == times(0.3, 0.1)
    assert bounds == Bounds(
        processors=3.0, room=HostMemory(shared_bytes=5, ram_bytes=9), batch_bytes=2, most_workers=7
    )


def test_spawned_workers_need_what_can_be_pickled_and_cost_more():
    fork, spawn = get_context("fork"), get_context("spawn")
    assert why_no_workers(lambda: 0, fork) is None
    assert why_no_workers(len, spawn) is None
    assert "pickle" in (why_no_workers(lambda: 0, spawn) or "")
    assert all(there > here for there, here in zip(start_costs(spawn), start_costs(fork), strict=True))


def test_a_daemon_starts_no_workers(monkeypatch):
    daemon = SimpleNamespace(daemon=True)
    monkeypatch.setattr(loader_tuning.multiprocessing, "current_process", lambda: daemon)
    assert "daemon" in (why_no_workers(len) or "")

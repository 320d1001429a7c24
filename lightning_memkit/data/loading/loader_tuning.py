"""Chooses the number of workers of a loader: computed from measured times, bounded by the machine, and tried.

One worker builds a batch in `load_seconds`, and the loop takes one every `step_seconds`. The loop is fed,
even if single batches take longer, by as many workers as are busy at most 0.7 of the time. If building takes
a small fraction of a step, no worker is cheaper than one, because a worker's batches must be transferred.
"""

import math
import multiprocessing
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from lightning_memkit.data.loading.host_memory import HostMemory
from lightning_memkit.data.loading.load_times import Measured

_BUSY = 0.7  # a worker builds at most this fraction of its time
_BUSY_STILL = 0.6  # a worker is removed if the others are then no busier than this
_NO_BETTER = 0.98
# Trials whose ratio of load and step times differs by more than this factor are not comparable.
_SAME_LOAD = 2.0
MOST_WORKERS = 64
_LEAST_LOAD = 1 / 8  # of a processor: at most eight waiting workers for each processor
_LEAST_PREFETCH, _MOST_PREFETCH = 2, 8
_START_SECONDS = {"fork": 0.2}
_START_SECONDS_ELSEWHERE = 4.0  # Python starts anew and imports torch
_WORKER_BYTES = {"fork": 64 * 2**20}
_WORKER_BYTES_ELSEWHERE = 400 * 2**20


@dataclass(frozen=True, kw_only=True)
class LoaderPlan:
    """The number of processes that build batches, and how many batches each builds ahead.

    Attributes:
        num_workers: 0 builds in the training process.
        prefetch: Batches ahead, for each worker.
    """

    num_workers: int = 0
    prefetch: int = _LEAST_PREFETCH

    def __str__(self) -> str:
        if not self.num_workers:
            return "no workers"
        return f"{self.num_workers} worker{'s' * (self.num_workers > 1)}, {self.prefetch} batches ahead each"


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The machine's resources that are left to a process for loading.

    Attributes:
        processors: Processors that it may use, including its own.
        room: Host memory for batches and workers.
        batch_bytes: Bytes of one batch.
        worker_bytes: Bytes of a worker process itself.
        start_seconds: Time until new workers deliver their first batch, without the time to build it.
        most_workers: The user's limit.
    """

    processors: float
    room: HostMemory
    batch_bytes: int = 0
    worker_bytes: int = _WORKER_BYTES["fork"]
    start_seconds: float = _START_SECONDS["fork"]
    most_workers: int = MOST_WORKERS

    def fits(self, plan: LoaderPlan) -> bool:
        """Whether the plan's batches under way and processes fit in memory."""
        shared = (plan.num_workers * plan.prefetch + 1) * self.batch_bytes
        own = plan.num_workers * (2 * self.batch_bytes + self.worker_bytes)
        return shared <= self.room.shared_bytes and shared + own <= self.room.ram_bytes


def start_costs(context: Any = None) -> tuple[float, int]:
    """Seconds and bytes to start a worker, by the start method of processes: estimates until one was started."""
    method = _start_method(context)
    return (
        _START_SECONDS.get(method, _START_SECONDS_ELSEWHERE),
        _WORKER_BYTES.get(method, _WORKER_BYTES_ELSEWHERE),
    )


def why_no_workers(build: Any, context: Any = None) -> str | None:
    """The reason why this process can't build in workers; None if none is known."""
    if multiprocessing.current_process().daemon:
        return "this process is a daemon, which may start no others"
    if _start_method(context) == "fork":
        return None
    try:
        pickle.Pickler(_Nowhere()).dump(build)
    except Exception as error:  # whatever the user's objects raise
        return f"workers that are spawned get the data set pickled, and that fails: {error!r}"
    return None


def wanted_plan(measured: Measured, bounds: Bounds, target: float, busy: float = _BUSY) -> LoaderPlan:
    """The fewest workers that keep the loop fed, within processors and memory; at least one, if any.

    Args:
        measured: Times of this loader, with any number of workers.
        bounds: The machine's bounds.
        target: Fraction of the time that the loop may wait.
        busy: Fraction of its time that a worker may build.
    """
    load, step = measured.load_seconds, measured.step_seconds
    if load <= target * (load + step) or bounds.most_workers < 1:
        return LoaderPlan()
    needed = math.ceil(load / (busy * step)) if step > 0 else MOST_WORKERS
    workers = max(1, min(needed, _most_workers(measured, bounds)))
    ahead = math.ceil(measured.longest_load_seconds / step / workers) + 1 if step > 0 else _MOST_PREFETCH
    plan = LoaderPlan(num_workers=workers, prefetch=min(_MOST_PREFETCH, max(_LEAST_PREFETCH, ahead)))
    while plan.num_workers and not bounds.fits(plan):
        less = {"prefetch": plan.prefetch - 1} if plan.prefetch > 1 else {"num_workers": plan.num_workers - 1}
        plan = replace(plan, **less)
    return plan if plan.num_workers else LoaderPlan()


def _most_workers(measured: Measured, bounds: Bounds) -> int:
    """The number of workers that fills the processors which the training process leaves free."""
    free = max(0.0, bounds.processors - measured.step_processors)
    by_processors = free / max(measured.load_processors, _LEAST_LOAD)
    return min(math.floor(by_processors + 0.1), bounds.most_workers, MOST_WORKERS)


class LoaderTuning:
    """A plan that is revised by measurements; plans that proved no better are not tried again.

    Args:
        plan: The first plan.
        target: Fraction of the time that the loop may wait.
    """

    def __init__(self, plan: LoaderPlan, target: float = 0.02) -> None:
        self.plan = plan
        self.target = target
        self._tried: dict[LoaderPlan, Measured] = {}

    def revise(self, measured: Measured, bounds: Bounds, batches: float, *, between_epochs: bool) -> bool:
        """Change the plan if that pays off; True if it changed.

        Args:
            measured: Times under the current plan.
            bounds: The machine's bounds.
            batches: Batches still to come, over which starting workers must pay off.
            between_epochs: Workers restart anyway, so that one may also be removed.
        """
        self._tried[self.plan] = measured
        before, self.plan = self.plan, self._next(measured, bounds, batches, between_epochs)
        return self.plan != before

    def _next(self, measured: Measured, bounds: Bounds, batches: float, between_epochs: bool) -> LoaderPlan:
        plan = self.plan
        if measured.stall_fraction <= self.target:
            fewer = wanted_plan(measured, bounds, self.target, _BUSY_STILL)
            gives_up = between_epochs and fewer.num_workers < plan.num_workers
            return fewer if gives_up and not self._is_no_better(fewer, measured) else plan
        best = min(self._comparable(measured), key=lambda tried: self._tried[tried].batch_seconds)
        if self._tried[best].batch_seconds < _NO_BETTER * measured.batch_seconds:
            return best
        wanted = wanted_plan(measured, bounds, self.target)
        if 0 < wanted.num_workers <= plan.num_workers:
            wanted = self._more(measured, bounds)
        if wanted == plan or self._is_no_better(wanted, measured):
            return plan
        saved = measured.batch_seconds - max(
            measured.step_seconds, measured.load_seconds / max(1, wanted.num_workers)
        )
        return wanted if saved * batches > bounds.start_seconds else plan

    def _more(self, measured: Measured, bounds: Bounds) -> LoaderPlan:
        """More prefetch or workers if the plan should suffice but does not: uneven batches, slow processes."""
        plan = self.plan
        deeper = replace(plan, prefetch=min(_MOST_PREFETCH, 2 * plan.prefetch))
        if deeper != plan and bounds.fits(deeper):
            return deeper
        wider = replace(plan, num_workers=plan.num_workers + 1)
        return wider if wider.num_workers <= _most_workers(measured, bounds) and bounds.fits(wider) else plan

    def _comparable(self, measured: Measured) -> list[LoaderPlan]:
        """Plans that were tried at a similar ratio of loading and stepping times as now."""

        def ratio(of: Measured) -> float:
            return of.load_seconds / of.step_seconds if of.step_seconds else math.inf

        now = ratio(measured)
        return [
            plan
            for plan, then in self._tried.items()
            if plan == self.plan or now / _SAME_LOAD <= ratio(then) <= now * _SAME_LOAD
        ]

    def _is_no_better(self, plan: LoaderPlan, measured: Measured) -> bool:
        if plan not in self._comparable(measured):
            return False
        return self._tried[plan].batch_seconds >= _NO_BETTER * measured.batch_seconds


def of_all_ranks(
    measured: Measured, bounds: Bounds, largest: Callable[[list[float]], list[float]]
) -> tuple[Measured, Bounds]:
    """The slowest loading, the fastest step and the least memory of all ranks, so that all choose the same plan.

    Args:
        measured: Times on this rank.
        bounds: Bounds of this rank.
        largest: Returns each number's maximum over the ranks.
    """
    slow = {
        name: getattr(measured, name) for name in vars(measured) if name not in ("batches", "step_seconds")
    }
    costs = {name: getattr(bounds, name) for name in ("batch_bytes", "worker_bytes", "start_seconds")}
    scarce = {"processors": bounds.processors, "most_workers": bounds.most_workers}
    room = vars(bounds.room)
    highest = {**slow, **costs}
    lowest = {"step_seconds": measured.step_seconds, **scarce, **room}
    found = largest([*highest.values(), *(-value for value in lowest.values())])
    agreed = dict(zip(highest, found, strict=False))
    agreed |= {name: -value for name, value in zip(lowest, found[len(highest) :], strict=True)}

    def of(names: Iterable[str]) -> dict[str, Any]:
        return {name: agreed[name] for name in names}

    return (
        replace(measured, **of(slow), step_seconds=agreed["step_seconds"]),
        replace(bounds, **of(costs), **of(scarce), room=HostMemory(**of(room))),
    )


class _Nowhere:
    """A file that discards what is written."""

    def write(self, data: bytes) -> int:
        return len(data)


def _start_method(context: Any) -> str:
    return (context or multiprocessing).get_start_method()

"""Run something once for each allocation that it makes, each time with that allocation failing."""

import gc
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from lightning_memkit.testing.faults import FailingAllocator, Fault, Faults, count_allocations, fail_at

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Outcome(Generic[T]):
    """The result of one run of a sweep.

    Attributes:
        point: the index of the allocation that was to fail.
        points: how many allocations a run without a fault makes.
        fault: the allocation that failed; None if the run did not reach it.
        result: what the run returned; None if it raised.
        expected: what the run returned without a fault.
        error: what the run raised, without its traceback, which would keep the failed step's tensors alive.
        leaked_bytes: bytes alive after the run, beyond those after the run without a fault.
    """

    point: int
    points: int
    fault: Fault | None
    result: T | None
    expected: T
    error: Exception | None
    leaked_bytes: int

    @property
    def recovered(self) -> bool:
        """Whether the allocation failed and the run completed nevertheless."""
        return self.fault is not None and self.error is None


def sweep(
    run: Callable[[Faults], T],
    *,
    on: FailingAllocator | None = None,
    repeat: bool = False,
    ranks: Collection[int] | None = None,
    armed: bool = True,
    points: Callable[[int], Iterable[int]] = range,
) -> Iterator[Outcome[T]]:
    """Yields the outcomes of runs in which each allocation of a fault-free run fails in turn.

    The fault-free run comes first. Each run should begin in the same state: build the model inside, or
    restore its state.

    Args:
        run: what must survive; it gets the faults, to arm and disarm them for a phase.
        on: the device whose allocator fails; None for the storages that operators create.
        repeat: whether every later allocation fails, too, until the run disarms.
        ranks: the ranks on which allocations fail, None for all. All ranks must run the same points: see
            `points`.
        armed: whether faults start at once; otherwise the run arms them.
        points: from the number of allocations to the points to try: `lambda count: range(0, count, 7)` is a
            sample.

    Example:
        >>> failures = [outcome for outcome in sweep(run) if not outcome.recovered]
    """
    clean = count_allocations(on=on, armed=armed)
    _tidy(on)
    with clean:
        expected = run(clean)
    total, baseline = clean.allocations, _settled_bytes(clean, on)
    for point in points(total):
        faults = fail_at(point, on=on, repeat=repeat, ranks=ranks, armed=armed)
        _tidy(on)
        result, error = _outcome(run, faults)
        yield Outcome(
            point=point,
            points=total,
            fault=faults.fault,
            result=result,
            expected=expected,
            error=error,
            leaked_bytes=_settled_bytes(faults, on, baseline) - baseline,
        )
        del result, error  # so that only the caller keeps them alive during the next run


def _tidy(device: FailingAllocator | None) -> None:
    """Free the last run's cycles now, since freeing them within this run would distort its counts."""
    if device is not None:
        gc.collect()


def _outcome(run: Callable[[Faults], T], faults: Faults) -> tuple[T | None, Exception | None]:
    try:
        with faults:
            return run(faults), None
    except Exception as error:
        return None, _bare(error)


def _bare(error: Exception) -> Exception:
    """The error without frames that keep tensors alive, also in the errors that caused it."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def _settled_bytes(faults: Faults, device: FailingAllocator | None, expected: int | None = None) -> int:
    """The bytes alive after pending work; cycles are collected only if the count is not the expected one."""
    if device is not None:
        device.synchronize()
    if faults.live_bytes != expected:
        gc.collect()
    return faults.live_bytes

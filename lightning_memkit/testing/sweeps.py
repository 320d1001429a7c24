"""Run something once for every allocation that it makes, each time with that allocation failing."""

import gc
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from lightning_memkit.testing.faults import FailingAllocator, Fault, Faults, count_allocations, fail_at

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Outcome(Generic[T]):
    """What came of one run of a sweep.

    Attributes:
        point: the index of the allocation that was to fail.
        points: how many allocations the run makes without a fault.
        fault: the one that failed; None where the run did not come to it.
        result: what the run returned; None where it raised.
        expected: what the run returned without a fault.
        error: what the run raised, its traceback cleared, since that would keep the failed step's tensors.
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
        """Whether the allocation failed and the run came to its end all the same."""
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
    """Yields the outcome of one run a point: each allocation of the fault-free run fails in turn.

    The fault-free run comes first. Each run should begin from the same state: build the model inside, or put its
    state back.

    Args:
        run: what is to survive; it gets the faults, to arm and disarm them where only a phase is meant.
        on: the device whose allocator fails; None for the storages that operators create.
        repeat: every later allocation fails too, until the run disarms.
        ranks: the ranks that fail, None for all. All ranks have to run the same points: see `points`.
        armed: whether faults start at once; else the run arms them.
        points: from the number of allocations to the points to try: `lambda count: range(0, count, 7)` is a sample.

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
        del result, error  # while the next one runs, only the caller keeps what it was given


def _tidy(device: FailingAllocator | None) -> None:
    """What the last run left in cycles is not to be freed within this one: a device's bytes are all it has."""
    if device is not None:
        gc.collect()


def _outcome(run: Callable[[Faults], T], faults: Faults) -> tuple[T | None, Exception | None]:
    try:
        with faults:
            return run(faults), None
    except Exception as error:
        return None, _bare(error)


def _bare(error: Exception) -> Exception:
    """The error without the frames that keep tensors alive, nor those of what led to it."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def _settled_bytes(faults: Faults, device: FailingAllocator | None, expected: int | None = None) -> int:
    """The bytes alive once nothing is left in a cycle or on its way; cycles are looked for where it matters."""
    if device is not None:
        device.synchronize()
    if faults.live_bytes != expected:
        gc.collect()
    return faults.live_bytes

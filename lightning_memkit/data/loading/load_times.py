"""Measures how long a training loop waits for batches and works on them, and how long batches take to build."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

from lightning_memkit.memory.processors import wanted_processor_seconds

_KEPT = 1000  # the last batches
_OUTLIER = 5.0  # a step that takes this many medians included something else: a compilation, a checkpoint


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Mean seconds per batch, over some batches.

    Attributes:
        batches: The number of batches.
        wait_seconds: The time that the loop waited.
        step_seconds: From a batch's arrival until the next was requested.
        load_seconds: The time to build one batch, in whichever process.
        longest_load_seconds: The longest of these times.
        load_processors: Processors that building uses while it lasts; below 1 if it waits for something else.
        step_processors: Processors that this process uses during a step.
    """

    batches: int
    wait_seconds: float
    step_seconds: float
    load_seconds: float
    longest_load_seconds: float
    load_processors: float
    step_processors: float

    @property
    def stall_fraction(self) -> float:
        """Fraction of the time in which the loop waited for data, 0 to 1."""
        total = self.wait_seconds + self.step_seconds
        return self.wait_seconds / total if total else 0.0

    @property
    def batch_seconds(self) -> float:
        """The time from one batch to the next."""
        return self.wait_seconds + self.step_seconds


@dataclass
class _Pair:
    """A wait, and the step that followed."""

    wait: float
    wait_cpu: float
    step: float = 0.0
    step_cpu: float = 0.0
    counts: bool = True


class LoadTimes:
    """Times a loop's waits and steps: reads clocks four times a batch, and does nothing on the device.

    Call `fetch_begins` before and `fetch_ends` after each batch is drawn. Workers report the time to build a
    batch by `built`; without workers the wait is that time.

    Args:
        clock: Returns seconds.
        cpu_clock: Returns the seconds for which this process wanted a processor.

    Attributes:
        start_wait: Seconds that the loop waited for the first batch of the latest iterator: the start of its
            workers, and building it. Counts only in what is logged.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = wanted_processor_seconds,
    ) -> None:
        self._clock, self._cpu_clock = clock, cpu_clock
        self._pairs: deque[_Pair] = deque(maxlen=_KEPT)
        self._loads: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._present: _Pair | None = None
        self._since = (0.0, 0.0)
        self._begins = True
        self._waited = self._stepped = 0.0
        self.start_wait = 0.0

    def fetch_begins(self) -> None:
        """The loop requests a batch."""
        now, cpu = self._clock(), self._cpu_clock()
        if self._present is not None:
            self._present.step, self._present.step_cpu = now - self._since[0], cpu - self._since[1]
            if self._present.counts:
                self._pairs.append(self._present)
            self._waited += self._present.wait
            self._stepped += self._present.step
            self._present = None
        self._since = now, cpu

    def fetch_ends(self) -> None:
        """The batch has arrived."""
        now, cpu = self._clock(), self._cpu_clock()
        self._present = _Pair(
            wait=now - self._since[0], wait_cpu=cpu - self._since[1], counts=not self._begins
        )
        if self._begins:
            self.start_wait, self._begins = self._present.wait, False
        self._since = now, cpu

    def built(self, seconds: float, cpu_seconds: float) -> None:
        """A worker built a batch."""
        self._loads.append((seconds, cpu_seconds))

    def begins_anew(self) -> None:
        """The next batch comes from a new iterator, whose workers may have to start first."""
        self._begins = True

    def skip(self) -> None:
        """What follows is not part of a step: validation, a checkpoint. The current batch does not count."""
        self._present = None

    def restart(self) -> None:
        """Forget the measurements so far, because other workers build from now on; what is to be logged is kept."""
        self._begins = True
        self._pairs.clear()
        self._loads.clear()
        if self._present is not None:
            self._present.counts = False

    def taken_stall_fraction(self) -> float | None:
        """Fraction of the time in which the loop waited since the last call; None without a batch since then."""
        total = self._waited + self._stepped
        fraction = self._waited / total if total else None
        self._waited = self._stepped = 0.0
        return fraction

    @property
    def batches(self) -> int:
        """Number of batches measured since `restart`, at most 1000."""
        return len(self._pairs)

    def measured(self, warm_up: int = 0) -> Measured | None:
        """The means, without the first `warm_up` batches that count since `restart`; None if there are no others."""
        pairs = list(self._pairs)[warm_up:]
        if not pairs:
            return None
        usual = _OUTLIER * median(pair.step for pair in pairs)
        steps = [pair for pair in pairs if pair.step <= usual]
        loads = list(self._loads)[warm_up:] or [(pair.wait, pair.wait_cpu) for pair in pairs]
        load, step = fmean(one for one, _ in loads), fmean(pair.step for pair in steps)
        return Measured(
            batches=len(pairs),
            wait_seconds=fmean(pair.wait for pair in pairs),
            step_seconds=step,
            load_seconds=load,
            longest_load_seconds=max(one for one, _ in loads),
            load_processors=fmean(cpu for _, cpu in loads) / load if load else 0.0,
            step_processors=fmean(pair.step_cpu for pair in steps) / step if step else 0.0,
        )

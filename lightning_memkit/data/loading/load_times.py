"""How long a training loop waits for batches, works on them, and how long they take to build."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

from lightning_memkit.memory.processors import wanted_processor_seconds

_KEPT = 1000  # of the last batches
_OUTLIER = 5.0  # a step of so many medians was something else as well: a compilation, a checkpoint


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds a batch, means over some batches.

    Attributes:
        batches: How many.
        wait_seconds: That the loop waited.
        step_seconds: From a batch's arrival until the next was asked for.
        load_seconds: That building one batch took, wherever that was.
        longest_load_seconds: The most of them.
        load_processors: Processors that building wants while it lasts; below 1 where it waits for something else.
        step_processors: Processors that this process wants during a step.
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
        """Share of the time in which the loop waited for data, 0 to 1."""
        total = self.wait_seconds + self.step_seconds
        return self.wait_seconds / total if total else 0.0

    @property
    def batch_seconds(self) -> float:
        """From a batch to the next."""
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
    """Times a loop's waits and steps: four readings of clocks a batch, and nothing on the device.

    Call `fetch_begins` before and `fetch_ends` after each batch is drawn. Workers tell what a batch took them by
    `built`; without workers that is the wait.

    Args:
        clock: Seconds.
        cpu_clock: Seconds for which this process wanted a processor.

    Attributes:
        start_wait: Seconds that the first batch of an iterator was waited for, as of the last one: the start of its
            workers, and its building. It counts only in what is logged.
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
        """The loop asks for a batch."""
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
        """The batch is there."""
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
        """The next batch comes from a new iterator: it is waited for until its workers have started, if any."""
        self._begins = True

    def skip(self) -> None:
        """What follows is no part of a step: validation, a checkpoint. The present batch does not count."""
        self._present = None

    def restart(self) -> None:
        """Forgets what was measured so far, since others build from now on; what is to be logged is kept."""
        self._begins = True
        self._pairs.clear()
        self._loads.clear()
        if self._present is not None:
            self._present.counts = False

    def taken_stall_fraction(self) -> float | None:
        """Share of the time in which the loop waited since this was asked last; None without a batch since."""
        total = self._waited + self._stepped
        fraction = self._waited / total if total else None
        self._waited = self._stepped = 0.0
        return fraction

    @property
    def batches(self) -> int:
        """That were measured since `restart`, at most 1000."""
        return len(self._pairs)

    def measured(self, warm_up: int = 0) -> Measured | None:
        """Means, without the first `warm_up` batches since `restart` that count; None where there are no others."""
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

"""Timing in pairs: what every timed claim of a benchmark rests on.

Two steps are timed one after the other, in random order, many times; the claim is the median of the ratios
of the pairs with its 95 % interval. Load from other processes hits both steps of a pair alike, so a ratio
survives on a busy machine where two separate timings would not. Each timed benchmark also times the same step
against itself: where that ratio is off by more than 1 %, the machine was too noisy and the run is void.
"""

import ctypes
import gc
import math
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

MINIMUM_PAIRS = 100
LONG_STEP_SECONDS = 1.0
LEAST_PAIRS = 10  # on a device, whose clock no other process shares
SELF_RATIO_TOLERANCE = 0.01
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt, in malloc.h
BOOTSTRAP_RESAMPLES = 4000

Step = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says to a benchmark.

    Args:
        quick: A smaller run with the same figures, in minutes.
        seed: Seeds the data, the models and the order of the pairs.
        only: The one case to run, of benchmarks that have named ones; nothing is written down then.
        size: The one micro-batch size to run, likewise.
        device: Where the rows of a GPU part run: "cuda", or "cpu" to see at a tiny size that their code runs.
    """

    quick: bool = False
    seed: int = 0
    only: str = ""
    size: str = ""
    device: str = "cuda"


@dataclass(frozen=True)
class Report:
    """What a benchmark found.

    Args:
        name: The module's name.
        figures: Flat names to numbers: what a claim in the docs may cite.
        rows: The lines of the printed table; the first row names the columns.
        void: True where a step timed against itself was off by more than 1 %.
        notes: Sentences that a reader of the table needs.
        failed: True where the run showed what must not be: the command's exit code is 1.
    """

    name: str
    figures: dict[str, float | int | bool]
    rows: list[dict[str, object]]
    void: bool = False
    notes: tuple[str, ...] = field(default=())
    failed: bool = False


@dataclass(frozen=True)
class Ratio:
    """Time of ours over time of the peer: below 1 is faster.

    Args:
        median: Median of the ratios of the pairs.
        low: Lower end of the median's 95 % bootstrap interval.
        high: Upper end; a claim of "at most" holds when this does.
        pairs: Number of pairs.
        ours_ms: Median milliseconds of our step, for orientation only.
        peer_ms: Median milliseconds of the peer's step, for orientation only.
    """

    median: float
    low: float
    high: float
    pairs: int
    ours_ms: float = math.nan
    peer_ms: float = math.nan

    def row(self, label: str) -> dict[str, object]:
        """Return the table row of this ratio under `label`."""
        return {
            "what": label,
            "ours_ms": round(self.ours_ms, 3),
            "peer_ms": round(self.peer_ms, 3),
            "ratio": round(self.median, 4),
            "low_95": round(self.low, 4),
            "high_95": round(self.high, 4),
            "pairs": self.pairs,
        }


def paired_ratio(
    ours: Step,
    peer: Step,
    *,
    pairs: int = MINIMUM_PAIRS,
    seed: int = 0,
    setup: Step | None = None,
    warm_up: int = 3,
) -> Ratio:
    """Time `ours` against `peer` in pairs of random order; takes `pairs + warm_up` runs of each.

    Half of the pairs run ours first, so that the place in the pair can't bias the ratio. The garbage
    collector is off while the clock runs, and CUDA is synchronised before each reading of it.

    Args:
        ours: The step that the claim is about.
        peer: What it is compared with; pass `ours` again for the row that shows the noise.
        pairs: At least 100, or fewer where a step takes over a second.
        seed: Seeds the order and the bootstrap.
        setup: Runs before every step, untimed.
        warm_up: Untimed runs of each step beforehand; at least 1.

    Raises:
        ValueError: Fewer than 100 pairs of steps that take less than a second, or no warm-up.
    """
    if pairs < 1 or warm_up < 1:
        raise ValueError(
            f"pairs={pairs}, warm_up={warm_up}: both must be at least 1; use pairs=100, warm_up=3."
        )
    for _ in range(warm_up):
        longest = max(_seconds(ours, setup), _seconds(peer, setup))
    if pairs < MINIMUM_PAIRS and longest < LONG_STEP_SECONDS:
        raise ValueError(
            f"pairs={pairs} of steps of {longest:.3g} s: a timed claim needs {MINIMUM_PAIRS} pairs where a "
            f"step takes less than {LONG_STEP_SECONDS:g} s; raise pairs=."
        )
    return _timed_pairs((ours, peer), setup, pairs, seed)


def paired_ratio_within(ours: Step, peer: Step, *, seconds: float, seed: int = 0) -> Ratio:
    """Time `ours` against `peer` in as many pairs as take `seconds`, between 10 and 100.

    For steps of a device that nothing else uses: there a few pairs tell what takes a hundred on a busy CPU.

    Args:
        ours: The step that the claim is about.
        peer: What it is compared with.
        seconds: What the pairs take together; two more of each step warm up.
        seed: Seeds the order and the bootstrap.
    """
    for _ in range(2):
        both = _seconds(ours, None) + _seconds(peer, None)
    pairs = min(MINIMUM_PAIRS, max(LEAST_PAIRS, int(seconds / max(both, 1e-9))))
    return _timed_pairs((ours, peer), None, pairs, seed)


def _timed_pairs(steps: tuple[Step, Step], setup: Step | None, pairs: int, seed: int) -> Ratio:
    rng = np.random.default_rng(seed)
    seconds = np.empty((pairs, 2))
    collector_was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for index, ours_first in enumerate(rng.permutation(pairs) % 2 == 0):
            for column in (0, 1) if ours_first else (1, 0):
                seconds[index, column] = _seconds(steps[column], setup)
    finally:
        if collector_was_on:
            gc.enable()
    ratios = seconds[:, 0] / seconds[:, 1]
    low, high = _median_interval(ratios, rng)
    ours_ms, peer_ms = 1000 * np.median(seconds, axis=0)
    return Ratio(float(np.median(ratios)), low, high, pairs, float(ours_ms), float(peer_ms))


def self_ratio_is_void(ratio: Ratio) -> bool:
    """Say whether a step timed against itself is off by more than 1 %: then the run is void."""
    return abs(ratio.median - 1) > SELF_RATIO_TOLERANCE


def one_thread() -> AbstractContextManager[None]:
    """Let torch use one thread within it: two on a machine of two cores meet every other process."""
    return threads(1)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use so many threads within it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, as an accelerator's caching allocator does.

    By default it gives the top of its heap back after each step, and page faults take it again in the next: up to
    half of a step's time, for sizes that depend on what else lies on the heap (two trainers, when timed as pairs).
    """
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        library.mallopt(_MMAP_MAX, 0)


def _seconds(step: Step, setup: Step | None) -> float:
    if setup is not None:
        setup()
    _wait_for_device()
    start = time.perf_counter()
    step()
    _wait_for_device()
    return time.perf_counter() - start


def _wait_for_device() -> None:
    # is_initialized: a CPU benchmark must not create a CUDA context just because the machine has a GPU.
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _median_interval(ratios: np.ndarray, rng: np.random.Generator) -> tuple[float, float]:
    chosen = rng.integers(len(ratios), size=(BOOTSTRAP_RESAMPLES, len(ratios)))
    medians = np.median(ratios[chosen], axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(low), float(high)

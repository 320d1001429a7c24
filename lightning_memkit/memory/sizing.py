"""The largest micro-batch whose measured peak fits, from a few trials and the line through them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_memkit.memory.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One measured micro-batch; a peak of None ran out of memory."""

    micro_batch_size: int
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """The size that was chosen, its measured peak, every trial on the way, and the sizes that are safe to time."""

    micro_batch_size: int
    peak_bytes: int
    trials: tuple[Trial, ...] = field(default=())
    candidates: tuple[int, ...] = field(default=())

    def __str__(self) -> str:
        sizes = ", ".join(str(trial.micro_batch_size) for trial in self.trials)
        return f"micro-batch {self.micro_batch_size}, peak {format_bytes(self.peak_bytes)} (tried: {sizes})"


class NothingFitsError(Exception):
    """Not even a micro-batch of 1 fits; carries its peak where it could be measured."""

    def __init__(self, peak_bytes: int | None) -> None:
        super().__init__("not even a micro-batch of 1 fits")
        self.peak_bytes = peak_bytes


def largest_fitting(
    peak_of: Callable[[int], int | None], *, usable_bytes: int, most: int, most_trials: int = 8
) -> Sizing:
    """The largest size up to `most` that was measured to fit; a handful of trials.

    Two small sizes give a line; its guess is tried, and each result moves the line or closes the interval.
    Only sizes that give another number of parts are tried: with 8 samples, 5, 6 and 7 all make two.

    Args:
        peak_of: measures a size; None where it runs out of memory.
        usable_bytes: the peak must not pass it.
        most: the samples of the effective batch.
        most_trials: how many sizes may be measured.

    Raises:
        NothingFitsError: a size of 1 does not fit.
    """
    candidates = sorted({-(-most // parts) for parts in range(1, most + 1)})
    trials: list[Trial] = []

    def fits(size: int) -> bool:
        trials.append(Trial(micro_batch_size=size, peak_bytes=peak_of(size)))
        peak = trials[-1].peak_bytes
        return peak is not None and peak <= usable_bytes

    if not fits(candidates[0]):
        raise NothingFitsError(trials[0].peak_bytes)
    low, high = 0, len(candidates)  # indices: the largest that fits, the smallest that does not
    while high - low > 1 and len(trials) < most_trials:
        # The line's guess, and after a miss bisection in turn: a peak with a flat start has no useful line.
        bisect = high < len(candidates) and len(trials) % 2 == 0
        guess = (low + high) // 2 if bisect else _reached(candidates, low, high, trials, usable_bytes)
        index = min(max(guess, low + 1), high - 1)
        if fits(candidates[index]):
            low = index
        else:
            high = index
    best = next(trial for trial in trials if trial.micro_batch_size == candidates[low])
    return Sizing(
        micro_batch_size=best.micro_batch_size, peak_bytes=best.peak_bytes or 0, trials=tuple(trials)
    )


def _reached(candidates: list[int], low: int, high: int, trials: list[Trial], usable_bytes: int) -> int:
    """The candidate that the line through the two nearest trials reaches."""
    measured = sorted(
        (trial.micro_batch_size, trial.peak_bytes) for trial in trials if trial.peak_bytes is not None
    )
    if len(measured) < 2:
        return low + 1
    around = [point for point in measured if point[0] >= candidates[low]][:2]
    (size_a, peak_a), (size_b, peak_b) = around if len(around) == 2 else measured[-2:]
    slope = (peak_b - peak_a) / (size_b - size_a)
    if slope <= 0:
        return high - 1
    reach = size_a + (usable_bytes - peak_a) / slope
    inside = [index for index in range(low + 1, high) if candidates[index] <= reach]
    return inside[-1] if inside else low + 1

"""Find the largest micro-batch whose measured peak fits, by a few trials and linear interpolation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightning_memkit.memory.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One measured micro-batch; a `peak_bytes` of None means that it ran out of memory."""

    micro_batch_size: int
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """The chosen size, its measured peak, every trial made, and the sizes that are safe to time.

    `fewest` is the smallest number of samples on which the step runs. With `chunk_rows` the batch runs whole, and
    modules in chunks of so many rows; with `chunk_tokens` of so many tokens of each. The trials' sizes are then those
    of chunks.
    """

    micro_batch_size: int
    peak_bytes: int
    trials: tuple[Trial, ...] = field(default=())
    candidates: tuple[int, ...] = field(default=())
    fewest: int = 1
    chunk_rows: int | None = None
    chunk_tokens: int | None = None

    def __str__(self) -> str:
        sizes = ", ".join(str(trial.micro_batch_size) for trial in self.trials)
        what = f"micro-batch {self.micro_batch_size}" if self.chunk_rows is None else "batches whole"
        chunks = [(self.chunk_rows, "rows"), (self.chunk_tokens, "tokens")]
        of = " and ".join(f"{size} {axis}" for size, axis in chunks if size is not None)
        within = f", modules in chunks of {of}" if of else ""
        return f"{what}{within}, peak {format_bytes(self.peak_bytes)} (tried: {sizes})"


TOLERANCE = 0.05  # relative difference allowed between measured and predicted peak


class NothingFitsError(Exception):
    """Not even a micro-batch of 1 fits; carries its peak if that could be measured."""

    def __init__(self, peak_bytes: int | None) -> None:
        super().__init__("not even a micro-batch of 1 fits")
        self.peak_bytes = peak_bytes


def part_sizes(most: int) -> list[int]:
    """The sizes up to `most` that each give a different number of micro-batches: for 8, 1, 2, 3, 4 and 8."""
    return sorted({-(-most // parts) for parts in range(1, most + 1)})


_MOST_CHUNKS = 256  # that are tried at first
_APART = 4  # sizes of chunks that are tried: a trial costs a step of the whole batch, or of a long row


def chunk_sizes(most: int, *, from_one: bool = False) -> list[int]:
    """The sizes of chunks that are tried, smaller than all; of few among very many, kernels would be slow."""
    sizes = [1 if from_one else -(-most // _MOST_CHUNKS)]
    while sizes[-1] * _APART < most // 2:
        sizes.append(sizes[-1] * _APART)
    return sorted({*sizes, max(1, most // 2)})


class Forecast:
    """Predicted peaks; a measured peak that is off by more than 5 % corrects them, once.

    Args:
        peak_of: the predicted peak of a size.
        factor: ratio of measured to predicted peaks in earlier runs on this device.
    """

    def __init__(self, peak_of: Callable[[int], float], factor: float = 1.0) -> None:
        self._peak_of = peak_of
        self._factor = factor
        self._corrections = 1
        self.ratio: float | None = None

    def peak_bytes(self, size: int) -> float:
        """The expected peak of a size, with corrections."""
        return self._peak_of(size) * self._factor

    def is_confirmed(self, trial: Trial) -> bool:
        """Whether a measured peak is as expected; if not, correct the expectation, once."""
        if trial.peak_bytes is None:
            return False
        if self.ratio is None:
            self.ratio = trial.peak_bytes / self._peak_of(trial.micro_batch_size)
        off = trial.peak_bytes / self.peak_bytes(trial.micro_batch_size) - 1
        if abs(off) <= TOLERANCE:
            return True
        if self._corrections:
            self._corrections -= 1
            self._factor *= 1 + off
        return False


def largest_fitting(
    peak_of: Callable[[int], int | None],
    *,
    usable_bytes: int,
    sizes: Sequence[int],
    most_trials: int = 8,
    forecast: Forecast | None = None,
) -> Sizing:
    """The largest of some sizes that was measured to fit; takes a few trials, one if a forecast holds.

    Two small sizes give a line; the size that it predicts is tried, and each result moves the line or narrows
    the interval. A forecast makes the first guess, which is accepted at once if its peak is as predicted.

    Args:
        peak_of: measures a size; None if it runs out of memory.
        usable_bytes: the most that the peak may be.
        sizes: ascending; see `part_sizes`.
        most_trials: how many sizes may be measured.
        forecast: predicted peaks of sizes.

    Raises:
        NothingFitsError: the first size does not fit.
    """
    candidates = list(sizes)
    trials: list[Trial] = []
    low, high = -1, len(candidates)  # indices: the largest that fits, the smallest that does not

    def tried(index: int) -> Trial:
        nonlocal low, high
        trials.append(Trial(micro_batch_size=candidates[index], peak_bytes=peak_of(candidates[index])))
        peak = trials[-1].peak_bytes
        if peak is not None and peak <= usable_bytes:
            low = max(low, index)
        else:
            high = min(high, index)
        return trials[-1]

    settled = forecast is not None and _as_forecast(tried, forecast, candidates, usable_bytes)
    if low < 0 and high > 0:
        tried(0)
    if low < 0:
        raise NothingFitsError(trials[-1].peak_bytes)
    while not settled and high - low > 1 and len(trials) < most_trials:
        # Try the line's guess; after a size that did not fit, alternate with bisection, since a peak that is
        # flat for small sizes gives no useful line.
        bisect = high < len(candidates) and len(trials) % 2 == 0
        guess = (low + high) // 2 if bisect else _reached(candidates, low, high, trials, usable_bytes)
        tried(min(max(guess, low + 1), high - 1))
    best = next(trial for trial in trials if trial.micro_batch_size == candidates[low])
    return Sizing(
        micro_batch_size=best.micro_batch_size, peak_bytes=best.peak_bytes or 0, trials=tuple(trials)
    )


def _as_forecast(
    tried: Callable[[int], Trial], forecast: Forecast, candidates: list[int], usable_bytes: int
) -> bool:
    """Try the largest size that is expected to fit, and once more after a correction; True if one fits."""
    open_to = range(len(candidates))
    for _ in range(2):
        reached = [index for index in open_to if forecast.peak_bytes(candidates[index]) <= usable_bytes]
        if not reached:
            return False
        trial = tried(reached[-1])
        fits = trial.peak_bytes is not None and trial.peak_bytes <= usable_bytes
        confirmed = forecast.is_confirmed(trial)
        open_to = range(reached[-1] + 1, len(candidates)) if fits else range(reached[-1])
        if fits and (confirmed or all(forecast.peak_bytes(candidates[i]) > usable_bytes for i in open_to)):
            return True
    return False


def _reached(candidates: list[int], low: int, high: int, trials: list[Trial], usable_bytes: int) -> int:
    """The largest candidate that fits according to the line through the two nearest trials."""
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

"""Choose the fastest of a few sizes that all fit, from noisy times of actual training steps."""

from collections.abc import Sequence
from statistics import median

_SWEEP_SLOWER = 1.15  # two successive sizes this much slower than the best end the sweep
_RACE_SLOWER = 1.3  # a contestant with a median this much slower than the best drops out
_CONTESTANTS, _TOO_SLOW = 4, 1.5  # the best of the sweep race, unless they are this much slower


def smaller_sizes(most: int, largest: int, count: int = 6) -> tuple[int, ...]:
    """`largest`, and the sizes that split `most` samples into 2, 4, ... times as many micro-batches.

    Args:
        most: samples of the effective batch.
        largest: the largest micro-batch that fits.
        count: the most sizes to return.
    """
    parts = [min(-(-most // largest) * 2**index, most) for index in range(count)]
    return tuple(sorted({-(-most // number) for number in parts}, reverse=True))


class FastestSize:
    """Finds the size with the highest throughput in a bounded number of timed steps, some of them slower.

    All timed steps are ordinary training steps. A sweep times two steps of each size from the largest
    downwards, and stops when two successive sizes are slower than the best, because throughput usually has
    one peak. The faster of the two steps counts, since kernels are loaded and tuned in the first. The best
    few then race in turns, so that a drift of the machine affects all of them alike; the median over rounds
    of the time ratios decides. Decisions depend only on observed times, so ranks that observe equal times ask
    for equal sizes.

    Args:
        sizes: the sizes to choose from, the largest first.
        most_steps: after this many observed steps, the best so far is chosen.
        margin: a smaller size must be faster than the largest by more than this fraction.

    Attributes:
        settled: the choice; None while steps are still to be timed.

    Raises:
        ValueError: there are no sizes, or they are not in descending order.
    """

    def __init__(self, sizes: Sequence[int], *, most_steps: int = 40, margin: float = 0.02) -> None:
        if not sizes or list(sizes) != sorted(set(sizes), reverse=True):
            raise ValueError(f"sizes={list(sizes)} must be unequal and fall; write the largest first.")
        self.settled: int | None = sizes[0] if len(sizes) == 1 else None
        self.steps = 0
        self._sizes = list(sizes)
        self._most_steps = most_steps
        self._margin = margin
        self._first: dict[int, float] = {}
        self._rounds: list[dict[int, float]] = [{}]  # seconds per sample by size; the first is the sweep
        self._racing: list[int] = []

    @property
    def best(self) -> int:
        """The choice, or the best so far."""
        return self._fastest() if self.settled is None else self.settled

    @property
    def seconds_per_sample(self) -> dict[int, float]:
        """The median time per sample of each size that was timed."""
        times = {size: [times[size] for times in self._rounds if size in times] for size in self._sizes}
        return {size: median(seconds) for size, seconds in times.items() if seconds}

    @property
    def held_by_memory(self) -> bool:
        """Whether only memory prevents a larger choice: no smaller size is faster than the largest."""
        return not self._sizes or self.best == self._sizes[0]

    def next_size(self) -> int:
        """The size with which the next step should run."""
        if self.settled is not None:
            return self.settled
        if not self._racing:
            return next(size for size in self._sizes if size not in self._rounds[0])
        turn = self._racing if len(self._rounds) % 2 else self._racing[::-1]
        return next(size for size in turn if size not in self._rounds[-1])

    def observe(self, size: int, seconds: float, samples: float) -> None:
        """Record the time of a step; `samples` may be any count to which its work is proportional."""
        if self.settled is not None or size not in self._sizes or samples <= 0:
            return
        self.steps += 1
        time = seconds / samples
        if self._racing and size in self._racing:
            self._rounds[-1].setdefault(size, time)
        elif not self._racing and size in self._first:
            self._rounds[0].setdefault(size, min(time, self._first[size]))
        else:
            self._first.setdefault(size, time)
        self._proceed()

    def limit(self, largest: int) -> None:
        """Exclude sizes above `largest`, which turned out not to fit; if none is left, choose `largest`."""
        self._sizes = [size for size in self._sizes if size <= largest]
        self._racing = [size for size in self._racing if size <= largest]
        self._rounds = [{size: t for size, t in times.items() if size <= largest} for times in self._rounds]
        if not self._sizes or (self.settled is not None and self.settled > largest):
            self.settled = largest
        if self.settled is None:
            self._proceed()

    def _proceed(self) -> None:
        """Advance from the sweep to the race, from round to round, and to the choice."""
        if len(self._sizes) == 1 or self.steps >= self._most_steps:
            self.settled = self._fastest()
        elif not self._racing and self._swept:
            self._racing = self._contestants()
            self._rounds.append({})
        elif self._racing and all(size in self._rounds[-1] for size in self._racing):
            if len(self._rounds) > 2:
                self._drop_the_slow()
            self._rounds.append({})
        if len(self._racing) == 1 and self.settled is None:
            self.settled = self._fastest()

    @property
    def _swept(self) -> bool:
        """Whether all sizes have been timed, or the last two show that the rest can't win."""
        times = self._rounds[0]
        if len(times) == len(self._sizes):
            return True
        last, fastest = list(times.values())[-2:], min(times.values(), default=0.0)
        return len(times) > 2 and all(seconds > fastest * _SWEEP_SLOWER for seconds in last)

    def _contestants(self) -> list[int]:
        times = self._rounds[0]
        near = [size for size in times if times[size] <= _TOO_SLOW * min(times.values())]
        return sorted(sorted(near, key=times.__getitem__)[:_CONTESTANTS], reverse=True)

    def _drop_the_slow(self) -> None:
        beside = self._beside(self._fastest())
        self._racing = [size for size in self._racing if beside[size] <= _RACE_SLOWER]

    def _beside(self, other: int) -> dict[int, float]:
        """Each size's time relative to another's in the same round: the median over rounds."""
        ratios = {
            size: [times[size] / times[other] for times in self._rounds if size in times and other in times]
            for size in self._sizes
        }
        return {size: median(values) for size, values in ratios.items() if values}

    def _fastest(self) -> int:
        """The largest size, unless a smaller one is faster by more than the margin."""
        largest = self._racing[0] if self._racing else self._sizes[0]
        beside = self._beside(largest)
        if not beside:
            return largest
        rivals = {size: ratio for size, ratio in beside.items() if not self._racing or size in self._racing}
        fastest = min(rivals, key=rivals.__getitem__)
        return fastest if rivals[fastest] < 1 - self._margin else largest

"""Find the fastest size that fits on the first training steps, which train as all others do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import torch

from lightning_memkit.memory.sizing import Sizing
from lightning_memkit.memory.speed import FastestSize
from lightning_memkit.micro_batching import batch_size
from lightning_memkit.micro_batching.batch_statistics import with_batch_statistics
from lightning_memkit.micro_batching.parts.runner import PartsRunner
from lightning_memkit.micro_batching.ranks.agreement import largest_of_ranks
from lightning_memkit.micro_batching.run import Run, Step
from lightning_memkit.micro_batching.sizes.tuned_sizes import TunedSize, TunedSizes
from lightning_memkit.utilities.tensors import tensors_of


def clock_may_choose(run: Run) -> bool:
    """Whether smaller micro-batches may be chosen because they are faster.

    Not if algorithms must be deterministic, as times are not; nor if a module normalizes with the batch's
    statistics, so that the size changes results by more than rounding.
    """
    module = run.module
    return not torch.are_deterministic_algorithms_enabled() and not with_batch_statistics(module)


class SizeTuning:
    """Times optimizer steps with several sizes until the fastest is known; each step counts.

    The device is synchronized around a step while tuning, and never again afterwards. On several ranks the slowest
    rank's time is taken, so that all ask for the same size. A step that was retried after an OOM is not timed: its
    size and larger ones are no longer candidates.

    Args:
        step: the first step.
        runner: runs batches in micro-batches; its partition's size is set before each optimizer step.
        sizing: the largest size that fits, and those that may be timed.
        proven: whether enough has been seen of the loss to split a batch that fits whole; asked before each step.
        kept: the cache that keeps the answer for later runs; None if it is not kept.
    """

    def __init__(
        self,
        step: Step,
        runner: PartsRunner,
        sizing: Sizing,
        *,
        proven: Callable[[], bool],
        kept: TunedSizes | None,
    ) -> None:
        self.sizes: tuple[int, ...] = sizing.candidates or (sizing.micro_batch_size,)
        self.fastest = FastestSize(self.sizes)
        self.fits_whole = self.sizes[0] >= largest_of_ranks(step.run, [batch_size(step.batch)])[0]
        self._runner = runner
        self._peak_bytes = sizing.peak_bytes
        self._proven = proven
        self._kept = kept
        self._size: int | None = None  # of the optimizer step that is being timed
        self._seconds, self._elements = 0.0, 0

    @property
    def size(self) -> int:
        """What a resumed run uses again: the size in use, or while tuning the best so far."""
        return self._runner.partition.micro_batch_size if self._is_over else self.fastest.best

    @property
    def probed_size(self) -> int:
        """The size for which the loss is probed: a batch that fits whole may be split soon, to time that."""
        if self.fits_whole and not self._is_over:
            return self.sizes[1]
        return self._runner.partition.micro_batch_size

    @property
    def _is_over(self) -> bool:
        return self.fastest.settled is not None

    @property
    def _aside(self) -> float:
        """The time that comparisons have taken within steps: it belongs to no size."""
        return self._runner.values.seconds + self._runner.whole.seconds

    def keep_whole(self, rows: int) -> bool:
        """End the tuning with whole batches, as the loss can't be split; False where so many rows don't fit."""
        if not self.fits_whole or rows > self.sizes[0]:
            return False
        self.fastest.settled = self.sizes[0]
        self._runner.partition.resize(self.sizes[0])
        return True

    @contextmanager
    def timed(self, step: Step) -> Iterator[None]:
        """Encloses a batch's step with all its retries; does nothing once the choice is made."""
        if step.starts_window and not self._is_over:
            self._begin(step)
        if self._is_over or self._size is None:
            yield
            return
        _synchronize(step.run)
        started, aside = perf_counter(), self._aside
        yield
        _synchronize(step.run)
        self._seconds += perf_counter() - started - (self._aside - aside)
        self._elements += sum(tensor.numel() for tensor in tensors_of(step.batch))
        if step.ends_window:
            self._observe(step)

    def _begin(self, step: Step) -> None:
        """Set the size of the optimizer step that begins; none where nothing may be split yet."""
        if self.fits_whole and (self._runner.partition.unsplittable or not self._proven()):
            self._size = None
            return
        self._size = self.fastest.next_size()
        self._seconds, self._elements = 0.0, 0
        self._resize(step, self._size)

    def _observe(self, step: Step) -> None:
        size = self._runner.partition.micro_batch_size
        if self._size is not None and size < self._size:
            self.fastest.limit(size)
        elif size == self._size:
            seconds, elements = largest_of_ranks(step.run, [self._seconds, float(self._elements)])
            self.fastest.observe(size, seconds, elements)
        if self.fastest.settled is not None:
            self._resize(step, self.fastest.settled)
            self._settle(step)

    def _resize(self, step: Step, size: int) -> None:
        if self._runner.partition.micro_batch_size != size:
            self._runner.partition.resize(size)
            step.run.set_gradient_parts(-(-batch_size(step.batch) // size))

    def _settle(self, step: Step) -> None:
        size, seconds = self.size, self.fastest.seconds_per_sample
        if size not in seconds:  # the device ran out of memory on every size that was timed
            return
        times = ", ".join(f"{other}: {seconds[other] / seconds[size]:.2f}" for other in seconds)
        step.run.info(
            f"MemoryBudget: micro-batch {size} is the fastest that fits, by {self.fastest.steps} training steps "
            f"(time of a sample beside it: {times})."
        )
        if self._kept is not None:
            speeds = {other: 1 / time for other, time in seconds.items() if time > 0}
            answer = TunedSize(micro_batch_size=size, peak_bytes=self._peak_bytes, elements_per_second=speeds)
            self._kept.keep(answer)


def _synchronize(run: Run) -> None:
    """Wait for the device, so that the clock sees the step's work; nothing on CPU."""
    device = run.device
    if device.type != "cpu" and torch.accelerator.is_available():
        torch.accelerator.synchronize(device)

"""Measure peaks by sizes: of micro-batches, or of chunks of modules."""

from contextlib import suppress
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_memkit.activations.chunks.axes import AxisName
from lightning_memkit.memory.sizing import Sizing, chunk_sizes, part_sizes
from lightning_memkit.micro_batching.parts.module_chunks import ModuleChunks
from lightning_memkit.micro_batching.proof.trial_values import StepFailedError
from lightning_memkit.micro_batching.proof.trials import Trials
from lightning_memkit.micro_batching.ranks.agreement import any_rank, largest_of_ranks
from lightning_memkit.micro_batching.run import Run, Step
from lightning_memkit.utilities.tensors import tensors_of


@dataclass(frozen=True, kw_only=True)
class ChunkSearch:
    """Sizes of chunks to choose from, instead of sizes of micro-batches.

    Attributes:
        modules: what runs in chunks.
        axis: of what they are chunks.
        most: rows of the batch, or tokens of its longest row.
        rows: in a micro-batch.
        chunk_rows: with chunks of tokens, the rows of a chunk, where batches are whole and modules in chunks of both.
        from_one: try chunks of one.
    """

    modules: ModuleChunks
    axis: AxisName
    most: int
    rows: int
    chunk_rows: int | None = None
    from_one: bool = False

    @property
    def sizes(self) -> list[int]:
        """Those that are tried."""
        return chunk_sizes(self.most, from_one=self.from_one)

    def resize(self, size: int) -> None:
        """Run the modules in chunks of this size."""
        self.modules.resize(*((size, None) if self.axis == "rows" else (self.chunk_rows, size)))

    def found(self, sizing: Sizing) -> Sizing:
        """The sizing of micro-batches and chunks, by one whose sizes are those of chunks."""
        rows, tokens = (
            (sizing.micro_batch_size, None)
            if self.axis == "rows"
            else (self.chunk_rows, sizing.micro_batch_size)
        )
        return replace(
            sizing, micro_batch_size=self.rows, chunk_rows=rows, chunk_tokens=tokens, candidates=(), fewest=1
        )

    def described(self, size: int, total: int) -> str:
        """What runs in chunks of this size, for an error."""
        whole = self.axis == "rows" or self.chunk_rows is not None or self.rows >= total > 1
        what = "The whole batch" if whole else f"A micro-batch of {self.rows}"
        rows = (
            f"{self.chunk_rows} {'row' if self.chunk_rows == 1 else 'rows'} and " if self.chunk_rows else ""
        )
        unit = self.axis.removesuffix("s") if size == 1 else self.axis
        return f"{what} with modules in chunks of {rows}{size} {unit}"


class Peaks:
    """Measures the peaks of micro-batches of the worst batch.

    Attributes:
        of_part_here: the peak of the last trial's forward and backward on this rank; None if it ran out of
            memory.
        of_part: the largest of all ranks' peaks.
        fewest: the fewest samples on which the step may run, as far as known; above 1, it has failed on one less.
        chunks: what has the size, if not micro-batches.
    """

    def __init__(self, step: Step, trials: Trials, states: list[Tensor], step_peak: int, total: int) -> None:
        self.of_part_here: int | None = None
        self.of_part: int | None = None
        self.fewest = 1
        self.chunks: ChunkSearch | None = None
        self._runs_on = total
        self._step, self._trials, self._total = step, trials, total
        self._states, self._step_peak = states, step_peak

    @property
    def least(self) -> int:
        """The least size that leaves no micro-batch of any batch with too few samples: 3 if 1 is too few."""
        return min(2 * self.fewest - 1, self._total) if self.chunks is None else 1

    @property
    def sizes(self) -> list[int]:
        """The sizes that are tried: those that give different numbers of micro-batches, or a few of chunks."""
        least = self.least
        parts = [size for size in part_sizes(self._total) if size >= least]
        return parts if self.chunks is None else self.chunks.sizes

    def try_one_row(self) -> None:
        """Find out whether the step runs on one sample, unless that is known."""
        if self._runs_on > 1:
            with suppress(StepFailedError):
                self.of(1)

    def of(self, size: int, limit: int | None = None) -> int | None:
        """The larger peak of a micro-batch of `size` and of the optimizer's step; None after an OOM on any rank.

        Raises:
            StepFailedError: the step does not run on so few samples, on this rank or another.
        """
        step, rows = self._step, size
        if self.chunks is not None:
            self.chunks.resize(size)
            rows = self.chunks.rows
            is_only = step.run.batches_a_step == 1 and rows >= self._total
            self._trials.zeroes = is_only and step.run.zeroes_gradients(step.optimizer)
        step.run.set_gradient_parts(-(-self._total // rows))
        part = step.run.worst_batch(step.batch, rows)
        held = [*self._states, *tensors_of(step.batch)]
        failure: StepFailedError | None = None
        try:
            self.of_part_here = self._trials.peak_of(step, part, held, limit)
        except StepFailedError as error:
            failure = error
        self._trials.zeroes = False
        if any_rank(step.run, failure is not None):
            self.fewest = max(self.fewest, size + 1)
            raise failure or StepFailedError(RuntimeError("another rank's step failed"), skipped=False)
        self._runs_on = min(self._runs_on, size)
        self.of_part = largest_peak(step.run, self.of_part_here)
        of_step = int(largest_of_ranks(step.run, [self._step_peak])[0])
        return None if self.of_part is None else max(self.of_part, of_step)


def largest_peak(run: Run, peak: int | None) -> int | None:
    """The largest peak of all ranks, so that all try the same sizes; None if one ran out of memory."""
    largest = largest_of_ranks(run, [float("inf") if peak is None else peak])[0]
    return None if largest == float("inf") else int(largest)

"""Decide whether a loader's evaluation batches are split, and into which sizes; remember the decision."""

import warnings
from dataclasses import dataclass, field
from typing import Any

from lightning_memkit.memory.sizing import NothingFitsError, chunk_sizes, largest_fitting, part_sizes
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.micro_batching import SplitError, batch_size
from lightning_memkit.micro_batching.evaluation.comparison import RETURNS, Comparisons, Pairs
from lightning_memkit.micro_batching.evaluation.long_rows import LongEvaluationRows
from lightning_memkit.micro_batching.evaluation.step import EvaluationStep
from lightning_memkit.micro_batching.evaluation.trials import EvaluationTrials
from lightning_memkit.micro_batching.options import BudgetOptions
from lightning_memkit.micro_batching.parts.joining import JoinError, Joining
from lightning_memkit.micro_batching.ranks.alone import Ranks
from lightning_memkit.micro_batching.run import Run
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from lightning_memkit.utilities.tensors import tensors_of

_MOST_TRIALS = 8


@dataclass(kw_only=True)
class Loader:
    """What is known about the batches of one loader in one kind of step."""

    size: int = 0  # the most samples that run at once; 0 before the first look
    limited: bool = False  # whether larger micro-batches did not fit
    exceeds: bool = False  # whether its first batch was measured to exceed the budget
    measured: float = 0.0  # elements of the largest micro-batch whose peak was measured
    pending: bool = True  # to be measured: in a new run, other tensors may be on the device
    told_apart: Pairs = frozenset()  # pairs of weighing rules that comparisons have told apart
    ranks: Ranks = field(default_factory=Ranks)
    rules: Joining | None = None  # for joining logged values
    unsplittable: str = ""  # why batches can't be split; "" if they can
    chunk_tokens: int | None = None  # of modules in chunks, where one sample does not fit


@dataclass(frozen=True, kw_only=True)
class BatchExtent:
    """The size of a batch; the largest of all ranks' if they communicate in each forward.

    Args:
        rows: its samples; 0 if unknown.
        elements: the number of elements of its tensors.
        unclear: why the samples are unknown.
    """

    rows: int
    elements: int
    unclear: str = ""

    def parts_of(self, size: int) -> int:
        """How many micro-batches of `size` samples the batch makes."""
        return max(1, -(-self.rows // size))


class EvaluationSizes:
    """Finds out whether a loader's batches may be split, and the largest micro-batches that fit.

    Args:
        run: the loop, of which evaluation is a part.
        options: the budget.
        trials: runs micro-batches without a trace.
        comparisons: finds out whether micro-batches reproduce a batch's results.
    """

    def __init__(
        self, run: Run, options: BudgetOptions, trials: EvaluationTrials, comparisons: Comparisons
    ) -> None:
        self._run = run
        self._options = options
        self._trials = trials
        self._comparisons = comparisons
        self.long_rows = LongEvaluationRows(run, trials)

    def first_look(self, step: EvaluationStep, known: Loader, extent: BatchExtent) -> None:
        """Measure the first batch whole; if it does not fit, `settle` decides in its own step."""
        options = self._options
        known.size = max(extent.rows, 1)
        try:
            peak = self._trials.peak_of(step, None, options.usable_bytes)
        except Exception as error:  # a step may need hooks that have not run yet
            self._run.debug(f"MemoryBudget measures the first {step.hook} as it runs: {error!r}")
            known.ranks.forget_part()
            return
        known.pending, known.measured = False, float(extent.elements)
        known.exceeds = peak is None or peak > options.usable_bytes
        if known.exceeds and extent.rows != 1 and step.hook == "predict_step":
            known.exceeds = self.can_split(step, known, extent)

    def settle(self, step: EvaluationStep, known: Loader, extent: BatchExtent) -> None:
        """Choose micro-batches for a first batch that does not fit, if they reproduce its results."""
        known.exceeds = False
        if extent.rows == 1 or self.can_split(step, known, extent):
            self.choose(step, known, extent, parts=2)

    def choose(self, step: EvaluationStep, known: Loader, extent: BatchExtent, *, parts: int) -> None:
        """Choose the largest micro-batch that is measured to fit and makes at least `parts` of the batch."""
        most, usable = -(-extent.rows // parts), self._options.usable_bytes
        if self._options.micro_batch_size != "auto":
            most = min(most, self._options.micro_batch_size)

        def peak_of(size: int) -> int | None:
            if size > most:  # known not to fit, or excluded by the user
                return None
            # Measure one sample without a limit, so that the error can say how much budget is missing.
            return self._trials.peak_of(step, size, None if size == 1 else usable)

        try:
            sizing = largest_fitting(
                peak_of, usable_bytes=usable, sizes=part_sizes(extent.rows), most_trials=_MOST_TRIALS
            )
        except NothingFitsError as error:
            if self.fits_in_chunks(step, known):
                known.measured = extent.elements / extent.rows
                return
            short = _shortfall(step.hook, error.peak_bytes, usable, self._options.headroom)
            raise BudgetError(short) from None
        known.size, known.limited = sizing.micro_batch_size, True
        known.measured = extent.elements / extent.rows * known.size
        self._run.info(f"MemoryBudget in {step.hook}: {sizing}; without gradients.")

    def fits_in_chunks(self, step: EvaluationStep, known: Loader) -> bool:
        """Whether one sample fits with modules in chunks of tokens, in smaller ones than now; if so, they are used."""
        if self._options.within == "step" or not self.long_rows.find(step, known.ranks):
            return False

        def peak_of(tokens: int) -> int | None:
            if known.chunk_tokens is not None and tokens >= known.chunk_tokens:
                return None
            with self.long_rows.at(step.hook, tokens):
                return self._trials.peak_of(step, 1, self._options.usable_bytes)

        try:
            sizing = largest_fitting(
                peak_of,
                usable_bytes=self._options.usable_bytes,
                sizes=chunk_sizes(self.long_rows.tokens),
                most_trials=_MOST_TRIALS,
            )
        except NothingFitsError:
            return False
        known.size, known.limited, known.chunk_tokens = 1, True, sizing.micro_batch_size
        self._run.info(
            f"MemoryBudget in {step.hook}: a row does not fit at once; {len(self.long_rows.names[step.hook])} modules "
            f"run in chunks of {known.chunk_tokens} tokens, without gradients."
        )
        return True

    def can_split(self, step: EvaluationStep, known: Loader, extent: BatchExtent) -> bool:
        """Whether micro-batches reproduce the batch's results; determined once, with a warning if not."""
        try:
            if not extent.rows:
                raise JoinError(extent.unclear)
            if step.hook == "predict_step":
                raise JoinError(RETURNS)
            if known.rules is None and not known.unsplittable:
                self.look(step, known)
        except JoinError as error:
            self.run_whole(step, known, extent, str(error))
        return not known.unsplittable

    def look(self, step: EvaluationStep, known: Loader, part: Any = None) -> None:
        """Compare some samples of the batch, or all of one micro-batch; the rules learn from it.

        Raises:
            JoinError: micro-batches don't reproduce the batch's results; the message says why.
        """
        known.rules = known.rules or self._comparisons.rules()
        known.told_apart |= self._comparisons.compare(step, known.rules, part)

    def run_whole(self, step: EvaluationStep, known: Loader, extent: BatchExtent, why: str) -> None:
        """Run the loader's batches whole from now on; one warning gives the reason and the remedy."""
        if known.unsplittable:
            return
        known.unsplittable = why
        rows = f" of {extent.rows} samples" if extent.rows else ""
        warnings.warn(
            f"{type(self._run.module).__name__}.{step.hook} runs its batches{rows} whole, which exceeds "
            f"the budget's usable {format_bytes(self._options.usable_bytes)}: {why}. {remedy(step)}",
            stacklevel=2,
        )


def remedy(step: EvaluationStep) -> str:
    """The remedy for a batch that exceeds the budget and is not split."""
    smaller = f"Use a smaller batch_size in dataloader {step.dataloader_idx}"
    if step.hook == "predict_step":
        return f"{smaller}: predictions are never split."
    return (
        f"{smaller}; or return None, and log means, sums, extremes and torchmetrics objects: a batch is split where "
        "its micro-batches give the same values."
    )


def extent_of(batch: Any, ranks: Ranks) -> BatchExtent:
    """The size of a batch, or the largest of those that ranks process together."""
    rows, why = 0, ""
    try:
        rows = batch_size(batch)
    except SplitError as error:
        why = str(error)
    elements = sum(tensor.numel() for tensor in tensors_of(batch))
    most, many, unclear = ranks.largest_of([rows, elements, bool(why)])
    if unclear:
        return BatchExtent(rows=0, elements=int(many), unclear=why or "another rank's batch can't be")
    return BatchExtent(rows=int(most), elements=int(many))


def _shortfall(hook: str, peak: int | None, usable: int, headroom: float) -> str:
    if peak is None:
        return (
            f"A micro-batch of 1 sample runs out of memory in {hook} on the device itself, without gradients."
        )
    enough = -(-peak / (1 - headroom) // 2**20)
    return (
        f"A micro-batch of 1 sample needs {format_bytes(peak)} in {hook}, {format_bytes(peak - usable)} more than the "
        f"budget's usable {format_bytes(usable)}. What would help: weights in bf16, shorter samples, or budget=\""
        f'{enough:.0f}MiB".'
    )

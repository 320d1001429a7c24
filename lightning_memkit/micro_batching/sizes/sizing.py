"""Choose the micro-batch size by measuring peaks on the real device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from lightning_memkit.memory.sizing import Forecast, NothingFitsError, Sizing, Trial, largest_fitting
from lightning_memkit.memory.speed import smaller_sizes
from lightning_memkit.micro_batching import batch_size
from lightning_memkit.micro_batching.batch_statistics import with_batch_statistics
from lightning_memkit.micro_batching.options import BudgetOptions
from lightning_memkit.micro_batching.proof.optimizer_trial import optimizer_state
from lightning_memkit.micro_batching.proof.trial_values import StepFailedError
from lightning_memkit.micro_batching.proof.trials import Trials
from lightning_memkit.micro_batching.ranks.agreement import largest_of_ranks
from lightning_memkit.micro_batching.run import Step
from lightning_memkit.micro_batching.sizes.peaks import ChunkSearch, Peaks, largest_peak
from lightning_memkit.micro_batching.sizes.recomputation import AutomaticPolicy
from lightning_memkit.micro_batching.sizes.shortfall import Needs, shortfall
from lightning_memkit.utilities.tensors import tensors_of

_MOST_TRIALS = 8


class BudgetError(RuntimeError):
    """The budget can't be kept, or the loss can't be split; says by how much or why, and what would help."""


def _nothing_kept(ratio: float) -> None:
    """A function and not a lambda, because a `Foreseen` made in another process is pickled."""


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """What was predicted for a run that is about to start.

    Attributes:
        peaks: predicted peak bytes by micro-batch size; empty if recomputation is chosen to fill the budget.
        remedy: if no size fits, the text that says which configurations would.
        residual: the ratio of measured to predicted peaks in earlier runs on the device.
        measured: called with that ratio of this run.
    """

    peaks: Mapping[int, int] = field(default_factory=dict)
    remedy: str = ""
    residual: float = 1.0
    measured: Callable[[float], None] = _nothing_kept


@dataclass(frozen=True, kw_only=True)
class SizeHints:
    """What is known of sizes before any is measured; a size that it suggests is used if one trial finds that it fits.

    Attributes:
        remembered: an earlier run's answer.
        foreseen: predicted peaks.
    """

    remembered: int | None = None
    foreseen: Foreseen | None = None


def choose_size(
    step: Step,
    trials: Trials,
    options: BudgetOptions,
    *,
    given: int | Literal["auto"],
    hints: SizeHints = SizeHints(),
    chunks: ChunkSearch | None = None,
) -> Sizing:
    """The largest micro-batch of the worst batch that fits when measured, or the given one; at most 8 trials.

    Args:
        step: the first step.
        trials: runs steps that leave no trace.
        options: the budget, and its headroom that has to stay free.
        given: the user's or a resumed run's size, which is only verified; or `"auto"`.
        hints: with `"auto"`, sizes to try first.
        chunks: sizes are of these chunks, with `given` as well.

    Raises:
        BudgetError: not even a micro-batch of 1 fits, or the given size does not.
        StepFailedError: with chunks, the step does not run on so few rows.
    """
    usable, foreseen = options.usable_bytes, hints.foreseen
    total = int(largest_of_ranks(step.run, [batch_size(step.batch)])[0])
    step.run.set_gradient_parts(total)
    most = total if chunks is None else chunks.most
    policy, forecast = AutomaticPolicy(step.run), None
    if foreseen is not None and foreseen.peaks:
        forecast = Forecast(foreseen.peaks.__getitem__, foreseen.residual)
    with optimizer_state(step) as (states, step_peak):
        peaks = Peaks(step, trials, states, step_peak, total)
        peaks.chunks = chunks

        def search() -> Sizing | None:
            if given != "auto":
                size = min(max(given, peaks.least), most)
                return _verified(size, peaks.of(size), usable)
            sizes = peaks.sizes
            try:
                # The smallest size is measured without a limit: its peak tells how much the budget lacks.
                return _automatic(
                    lambda size: peaks.of(size, None if size <= sizes[0] else usable),
                    usable,
                    sizes,
                    None if hints.remembered is None else min(max(hints.remembered, peaks.least), most),
                    forecast,
                )
            except NothingFitsError:
                return None
            except StepFailedError:
                if chunks is not None:
                    raise
                # The step fails on so few rows, and `least` has grown. This ends: an error on the whole batch
                # is raised as it is.
                return search()

        if chunks is None and total > 1 and (given == 2 or with_batch_statistics(step.run.module)):
            peaks.try_one_row()
        sizing = search()
        if sizing is None and chunks is not None and chunks.axis == "rows" and chunks.sizes[0] > 1:
            chunks = peaks.chunks = replace(chunks, from_one=True)
            sizing = search()
        if sizing is None and policy.tightened(peaks.of_part, usable):
            sizing = search()
        if sizing is None:
            needs = Needs.measured(step, part_peak=peaks.of_part_here, step_peak=step_peak, states=states)
            predicted = "" if foreseen is None else foreseen.remedy
            size = min(peaks.sizes[0] if given == "auto" else given, most)
            needs = needs if chunks is None else replace(needs, what=chunks.described(size, total))
            raise BudgetError(shortfall(needs, size, usable, options.headroom, predicted))
        sizing = policy.loosened(sizing, lambda size: peaks.of(size, usable), usable)
        if chunks is None and given == "auto" and sizing.candidates == ():
            sizing = _with_candidates(step, sizing, lambda size: peaks.of(size, usable), usable, total)
            if min(sizing.candidates, default=total) < total and peaks.fewest == 1:
                peaks.try_one_row()
            candidates = tuple(size for size in sizing.candidates if size >= peaks.least or size == total)
            sizing = replace(sizing, candidates=candidates)
        sizing = replace(sizing, fewest=peaks.fewest)
    if foreseen is not None and forecast is not None and forecast.ratio is not None:
        foreseen.measured(forecast.ratio)
    if chunks is not None:
        sizing = chunks.found(sizing)
    step.run.set_gradient_parts(-(-total // sizing.micro_batch_size))
    return sizing


def _automatic(
    peak_of: Callable[[int], int | None],
    usable: int,
    sizes: Sequence[int],
    remembered: int | None,
    forecast: Forecast | None = None,
) -> Sizing:
    """The remembered size if it fits, else the largest size that does."""
    if remembered is None:
        return largest_fitting(
            peak_of, usable_bytes=usable, sizes=sizes, most_trials=_MOST_TRIALS, forecast=forecast
        )
    peak = peak_of(remembered)
    sizing = _verified(remembered, peak, usable)
    if sizing is not None:
        return sizing
    first = Trial(micro_batch_size=remembered, peak_bytes=peak)
    sizing = largest_fitting(peak_of, usable_bytes=usable, sizes=sizes, most_trials=_MOST_TRIALS - 1)
    return replace(sizing, trials=(first, *sizing.trials))


def _verified(size: int, peak: int | None, usable: int) -> Sizing | None:
    """A sizing of this size alone, if it fits."""
    if peak is None or peak > usable:
        return None
    trial = Trial(micro_batch_size=size, peak_bytes=peak)
    return Sizing(micro_batch_size=size, peak_bytes=peak, trials=(trial,), candidates=(size,))


def _with_candidates(
    step: Step, sizing: Sizing, peak_of: Callable[[int], int | None], usable: int, total: int
) -> Sizing:
    """The sizing with smaller sizes, which may be faster, as candidates.

    They fit if the largest does, unless gradients of several micro-batches are accumulated in float32
    (`set_gradient_parts`) and need more bytes: then the largest size that splits is measured.
    """
    largest = sizing.micro_batch_size
    candidates = smaller_sizes(total, largest)
    if largest < total or len(candidates) == 1 or not step.run.sums_gradients_otherwise:
        return replace(sizing, candidates=candidates)
    trials = sizing.trials
    if not any(_fits(trial, usable) and candidates[1] <= trial.micro_batch_size < total for trial in trials):
        if len(trials) >= _MOST_TRIALS:
            return replace(sizing, candidates=(largest,))
        trials = (*trials, Trial(micro_batch_size=candidates[1], peak_bytes=peak_of(candidates[1])))
        if not _fits(trials[-1], usable):
            candidates = (largest,)
    return replace(sizing, trials=trials, candidates=candidates)


def _fits(trial: Trial, usable: int) -> bool:
    return trial.peak_bytes is not None and trial.peak_bytes <= usable


def verify_whole(step: Step, trials: Trials, options: BudgetOptions, *, why: str) -> Sizing:
    """Measure the peak of a batch that can't be split.

    Raises:
        BudgetError: it does not fit.
    """
    usable = options.usable_bytes
    step.run.set_gradient_parts(1)
    with optimizer_state(step) as (states, step_peak):
        part_peak = trials.peak_of(step, step.batch, [*states, *tensors_of(step.batch)], None)
        peak = largest_peak(step.run, None if part_peak is None else max(part_peak, step_peak))
        if peak is None or peak > usable:
            needs = Needs.measured(step, part_peak=part_peak, step_peak=step_peak, states=states)
            raise BudgetError(f"{shortfall(needs, None, usable, options.headroom)} {why}")
    return Sizing(micro_batch_size=1, peak_bytes=peak, trials=(Trial(micro_batch_size=1, peak_bytes=peak),))

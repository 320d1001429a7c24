"""Into what parts a loader's evaluation batches are split: measured, compared, remembered."""

import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_debug, rank_zero_info

from lightning_memkit.memory.sizing import NothingFitsError, largest_fitting
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.micro_batching import SplitError, batch_size
from lightning_memkit.micro_batching.joining import JoinError, Joining
from lightning_memkit.plugins import _evaluation_state as state
from lightning_memkit.plugins._evaluation_comparison import Comparisons
from lightning_memkit.plugins._evaluation_trials import EvaluationTrials, Peak
from lightning_memkit.plugins._options import BudgetOptions
from lightning_memkit.plugins._rank_alone import Ranks
from lightning_memkit.plugins._seam_evaluation import EvaluationStep
from lightning_memkit.plugins._sizing import BudgetError
from lightning_memkit.utilities.tensors import tensors_of

_MOST_TRIALS = 8
_MOST_COMPARISONS = 4


@dataclass(kw_only=True)
class Loader:
    """What is known of one loader's batches in one kind of step."""

    size: int = 0  # samples that a part may hold, or that ran whole; 0 before the first look
    limited: bool = False  # larger ones did not fit
    passes: bool = False  # its first batch was measured not to fit
    measured: float = 0.0  # elements of the largest part whose peak was measured
    pending: bool = True  # the first batch of a run: other things may be on the device than in the last run
    outputs_pass: bool = False  # what steps return is too much to be gathered within the budget
    looks: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    joining: Joining | None = None
    unsplittable: str = ""
    unproved: bool = False
    left: frozenset[state.Key] = field(default_factory=frozenset)  # what steps change in their module
    watched: frozenset[state.Key] = field(default_factory=frozenset)  # of it, what parts leave otherwise


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How large a batch is: where ranks meet in each forward, the largest of all ranks', so that all decide alike.

    Args:
        rows: its samples; 0 where they can't be told.
        elements: the numbers that its tensors hold.
        unclear: why they can't be told.
    """

    rows: int
    elements: int
    unclear: str = ""

    def parts_of(self, size: int) -> int:
        """How many parts of so many samples it makes."""
        return max(1, -(-self.rows // size))


class EvaluationSizes:
    """Finds out whether a loader's batches may be split, and the largest parts that fit.

    Args:
        trainer: the trainer whose loops they are.
        options: the budget.
        trials: runs parts without a trace.
        comparisons: finds out how parts are joined.
    """

    def __init__(
        self, trainer: Trainer, options: BudgetOptions, trials: EvaluationTrials, comparisons: Comparisons
    ) -> None:
        self._trainer = trainer
        self._options = options
        self._trials = trials
        self._comparisons = comparisons

    def first_look(self, step: EvaluationStep, known: Loader, extent: Extent) -> None:
        """Measure the first batch whole; what to do where it does not fit is found out in its step."""
        options = self._options
        known.size = max(extent.rows, 1)
        if extent.rows and options.micro_batch_size != "auto":
            known.size, known.limited = options.micro_batch_size, True
            return
        try:
            peak = self._trials.peak_of(step, None, options.usable_bytes)
        except Exception as error:  # a step may count on hooks that run between here and there
            rank_zero_debug(f"MemoryBudget measures the first {step.hook} as it runs: {error!r}")
            known.ranks.forget_part()
            return
        known.pending, known.measured = False, float(extent.elements)
        known.passes = peak is None or peak.part_bytes > options.usable_bytes

    def settle(self, step: EvaluationStep, known: Loader, extent: Extent) -> None:
        """A first batch that does not fit: parts, if they give its results."""
        known.passes = False
        if not extent.rows:
            self.run_whole(step, known, extent.unclear)
        elif extent.rows == 1 or self.can_split(step, known):
            self.choose(step, known, extent, parts=2)

    def choose(self, step: EvaluationStep, known: Loader, extent: Extent, *, parts: int) -> None:
        """Take the largest part that is measured to fit, so that there are at least so many."""
        most = -(-extent.rows // parts)
        usable, measured = self._options.usable_bytes, dict[int, Peak | None]()

        def peak_of(size: int, *, with_outputs: bool) -> int | None:
            if size > most:  # known not to fit
                return None
            if size not in measured:
                # A part of 1 is measured without a limit: its peak says by how much the budget is short.
                measured[size] = self._trials.peak_of(step, size, None if size == 1 else usable)
            peak = measured[size]
            if peak is None:
                return None
            return peak.part_bytes + (peak.other_outputs_bytes if with_outputs else 0)

        options: dict[str, Any] = {"usable_bytes": usable, "most": extent.rows, "most_trials": _MOST_TRIALS}
        try:
            sizing = largest_fitting(partial(peak_of, with_outputs=not known.outputs_pass), **options)
        except NothingFitsError:
            smallest = measured[1]
            if smallest is None or smallest.part_bytes > usable:
                short = None if smallest is None else smallest.part_bytes
                raise BudgetError(_shortfall(step.hook, short, usable, self._options.headroom)) from None
            self.outputs_pass(step, known)
            sizing = largest_fitting(partial(peak_of, with_outputs=False), **options)
        known.size, known.limited = sizing.micro_batch_size, True
        known.measured = extent.elements / extent.rows * known.size
        rank_zero_info(f"MemoryBudget in {step.hook}: {sizing}; without gradients.")

    def outputs_pass(self, step: EvaluationStep, known: Loader) -> None:
        """The parts would fit, but what they return does not fit beside them."""
        known.outputs_pass = True
        on_host = self._trainer.strategy.root_device.type == "cpu"
        what = "they pass it" if on_host else "they are gathered on the host, and hooks get them there"
        warnings.warn(
            f"What {step.hook} returns for a batch does not fit into the budget beside its parts: {what}. Return less "
            "(class indices for logits), or nothing where no hook needs it.",
            stacklevel=2,
        )

    def can_split(self, step: EvaluationStep, known: Loader) -> bool:
        """Whether parts give the whole batch's results, found out once; a warning where they don't."""
        if known.joining is None and not known.unsplittable:
            self.look(step, known)
        return not known.unsplittable

    def look(self, step: EvaluationStep, known: Loader) -> None:
        """Compare some samples whole and in parts; the rules learn from it."""
        known.joining = known.joining or self._comparisons.joining()
        found = self._comparisons.compare(step, known.joining, known.looks)
        known.looks += 1
        if found.unsplittable:
            self.run_whole(step, known, found.unsplittable)
            return
        if found.unproved:
            known.unproved = True
            warnings.warn(
                f"MemoryBudget can't check that {step.hook} may run in parts, since {found.unproved}: rows are "
                "joined, and numbers averaged by labels where there are some, else by samples.",
                stacklevel=2,
            )
        known.left |= found.left
        known.watched = frozenset(key for key in known.left if not known.joining.keeps(("left", key)))

    def settles(self, step: EvaluationStep, known: Loader) -> bool:
        """Compare again where rules are in doubt; whether there is something new to go by.

        Raises:
            JoinError: parts don't give the whole's results after all.
        """
        if known.unproved or known.joining is None:
            return False
        if known.looks == _MOST_COMPARISONS:
            known.unproved = True
            names = ", ".join(known.joining.doubtful)
            warnings.warn(
                f"MemoryBudget can't tell how the parts of {names} in {step.hook} make the whole's: several ways "
                "agree on all samples that were compared; the likeliest is taken.",
                stacklevel=2,
            )
            return False
        self.look(step, known)
        if known.unsplittable:
            raise JoinError(known.unsplittable)
        return not known.unproved

    def run_whole(self, step: EvaluationStep, known: Loader, why: str) -> None:
        """From now on the loader's batches run whole; a warning says why."""
        if known.unsplittable:
            return
        known.unsplittable = why
        warnings.warn(
            f"{type(self._trainer.lightning_module).__name__}.{step.hook} runs its batches whole, which may pass the "
            f"budget: {why}. To mend it, let it return and log rows, or means, sums and extremes over them; or "
            "make the loader's batches smaller.",
            stacklevel=2,
        )


def extent_of(batch: Any, ranks: Ranks) -> Extent:
    """How large a batch is, or the largest of those that ranks are at together."""
    rows, why = 0, ""
    try:
        rows = batch_size(batch)
    except SplitError as error:
        why = str(error)
    elements = sum(tensor.numel() for tensor in tensors_of(batch))
    most, many, unclear = ranks.largest_of([rows, elements, bool(why)])
    if unclear:
        return Extent(rows=0, elements=int(many), unclear=why or "another rank's batch can't be")
    return Extent(rows=int(most), elements=int(many))


def _shortfall(hook: str, peak: int | None, usable: int, headroom: float) -> str:
    if peak is None:
        return f"A part of 1 sample runs out of memory in {hook} on the device itself, without gradients."
    enough = -(-peak / (1 - headroom) // 2**20)
    return (
        f"A part of 1 sample needs {format_bytes(peak)} in {hook}, {format_bytes(peak - usable)} more than the "
        f"budget's usable {format_bytes(usable)}. What would help: weights in bf16, shorter samples, or budget=\""
        f'{enough:.0f}MiB".'
    )

"""Decide how a run's batches are split: what parts weigh, how large they are, and whether they may be taken at all."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lightning_memkit.memory.sizing import Sizing
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.micro_batching import SplitError, batch_size, weigher
from lightning_memkit.micro_batching.graph.loss_rules import VARYING_FACTOR
from lightning_memkit.micro_batching.options import BudgetOptions
from lightning_memkit.micro_batching.parts.by_tokens import form_by_tokens
from lightning_memkit.micro_batching.parts.partition import WHOLE
from lightning_memkit.micro_batching.parts.runner import PartsRunner
from lightning_memkit.micro_batching.proof import verdicts
from lightning_memkit.micro_batching.proof.probe import Weighing
from lightning_memkit.micro_batching.proof.trials import Trials
from lightning_memkit.micro_batching.proof.verdicts import weighed_by, why_whole
from lightning_memkit.micro_batching.ranks.agreement import any_rank, largest_of_ranks
from lightning_memkit.micro_batching.ranks.worst import worst_of_ranks
from lightning_memkit.micro_batching.run import Step
from lightning_memkit.micro_batching.shares.foreseen import (
    ForeseenElsewhereError,
    ForeseenWronglyError,
    KeptConstantError,
    LoneCountError,
    MistakenTotalsError,
    NothingCountedError,
    UnknownTotalsError,
    VaryingFactorError,
)
from lightning_memkit.micro_batching.sizes.known import KnownSizes
from lightning_memkit.micro_batching.sizes.shortfall import ran_dry
from lightning_memkit.micro_batching.sizes.sizing import BudgetError, Foreseen
from lightning_memkit.micro_batching.sizes.tuning import SizeTuning, clock_may_choose
from lightning_memkit.micro_batching.sizes.window import AccumulationWindow


class PartsChoice:
    """Sets a runner's partition: before step 1 by probe and measurement, later by probes of what is new in a batch.

    Args:
        options: what the user wants.
        runner: runs batches in parts; its partition is set here.
        trials: run the steps that leave no trace.
        window: how many loader batches make a step.
        resumed: the state of the run that is resumed: its size is repeated.
        foresee: predicts the peaks of sizes, None where that can't be or does not pay.

    Attributes:
        sizing: the size that was verified before step 1, None before.
        tuning: what finds the fastest size; None where nothing is left to be found.
        known: sizes that are known without being measured anew, and what was predicted of them.
    """

    def __init__(
        self,
        options: BudgetOptions,
        runner: PartsRunner,
        trials: Trials,
        window: AccumulationWindow,
        resumed: Mapping[str, Any],
        foresee: Callable[[Step, Sequence[int]], Foreseen | None],
    ) -> None:
        self.sizing: Sizing | None = None
        self.tuning: SizeTuning | None = None
        self.weighing = Weighing(options.weigh_by, options.split)
        self._options = options
        self._runner = runner
        self._trials = trials
        self._window = window
        self._resumed = resumed
        self.known = KnownSizes(options, trials, resumed, foresee)
        self._warned = ""
        self._sized_for = 0  # samples of the largest batch that a size was measured for

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run repeats: the size in use, or the sizes of which the clock has still to choose one."""
        partition, tuning = self._runner.partition, self.tuning
        under_way = tuning is not None and tuning.fastest.settled is None
        return {
            "micro_batch_size": self.size_in_use if tuning is None else self._at_most_whole(tuning.size),
            "open_sizes": list(tuning.sizes) if tuning is not None and under_way else [],
            "given": self._options.micro_batch_size,
            "by_tokens": partition.row_tokens is not None,
            "row_tokens": partition.row_tokens,
            "wide": sorted(partition.wide),
        }

    @property
    def size_in_use(self) -> int:
        """The most samples in a part; of batches that run whole, those of the largest one so far."""
        return self._at_most_whole(self._runner.partition.micro_batch_size)

    def _at_most_whole(self, size: int) -> int:
        return min(size, self._sized_for or size)

    @property
    def faster_than_larger_ones(self) -> int | None:
        """The size that the clock has chosen, if larger ones fit and are slower."""
        fastest = self.tuning.fastest if self.tuning is not None else None
        return None if fastest is None or fastest.held_by_memory else fastest.settled

    def timed(self, step: Step) -> AbstractContextManager[None]:
        """Encloses a batch's step, whose time may decide."""
        return nullcontext() if self.tuning is None else self.tuning.timed(step)

    def before_first(self, step: Step) -> Sizing:
        """Probe, measure, choose.

        Raises:
            BudgetError: the budget can't hold what has to be held, or the loss can't be split.
        """
        with step.run.scanned_once():
            self.sizing = sizing = self._first(step)
        step.run.info(
            f"MemoryBudget: {sizing}; budget {format_bytes(self._options.budget_bytes)}, weighed by "
            f"{weighed_by(self.weighing)}."
        )
        return sizing

    def _first(self, step: Step) -> Sizing:
        options, partition = self._options, self._runner.partition
        try:
            total = batch_size(step.batch)
        except SplitError as error:
            if options.micro_batch_size != "auto":
                raise
            warnings.warn(f"MemoryBudget runs batches whole: {error}", stacklevel=2)
            sizing = self.known.whole(step, why=str(error))
            partition.whole, self._runner.unsplittable = True, str(error)
            return sizing
        self._window.open(step.run, total)
        # The probe's backward may end what forks can do.
        self.known.look(step, total)
        self._settle(step)
        if options.micro_batch_size != "auto" and not self._runs_whole:
            self._check(splits=options.micro_batch_size < total)
        sizing = self._sized(step, self.known.foreseen)
        is_open = bool(self._resumed.get("open_sizes"))
        if is_open or self._resumed.get("by_tokens", True):
            form_by_tokens(step, self._trials, partition, options.usable_bytes, self.known.resumed_tokens)
        self.tuning = self._tuning_of(step, sizing)
        return sizing

    def _sized(self, step: Step, foreseen: Foreseen | None) -> Sizing:
        """Measure and set the size: of parts, or of whole batches where the loss can't be split."""
        partition, total = self._runner.partition, batch_size(step.batch)
        sizing = self._size(step, foreseen)
        self._sized_for = int(largest_of_ranks(step.run, [total])[0])
        partition.micro_batch_size = sizing.micro_batch_size
        self._check(splits=sizing.micro_batch_size < total)
        return sizing

    def before_later(self, step: Step) -> None:
        """Probe where this batch is the first to differ; measure where it is the largest so far, and none was split.

        Raises:
            BudgetError: it shows that the loss can't be split, and as a whole it does not fit.
        """
        partition = self._runner.partition
        if partition.whole:
            return
        known = self._mismatch
        self._settle(step)
        total = batch_size(step.batch)
        grown = any_rank(step.run, total > self._sized_for) and partition.micro_batch_size >= self._sized_for
        found = self._mismatch and not known and self._runs_whole
        if (grown and (self._options.micro_batch_size == "auto" or self._runs_whole)) or found:
            self.sizing = self._sized(step, None)
        else:
            self._check(splits=partition.micro_batch_size < total and not partition.held)

    def reconsider(self, step: Step, error: ForeseenWronglyError, *, last: bool) -> None:
        """After a batch whose loss was another one than foreseen, and before it runs again.

        Args:
            step: the batch's.
            error: what was foreseen wrongly on this rank; all ranks act on the worst of theirs.
            last: it was foreseen wrongly so often that batches run whole from here on.

        Raises:
            BudgetError: its loss can't be split, and as a whole it does not fit.
        """
        partition, weighing = self._runner.partition, self.weighing
        error = worst_of_ranks(step.run, error)
        if last:
            weighing.refuse(verdicts.never_as_foreseen(str(error)))
            self._take_over(step)
            self.sizing = self._sized(step, None)
            return
        if isinstance(error, NothingCountedError):
            partition.counts_nothing = step.batch_idx
            return
        if isinstance(error, LoneCountError):
            # Where it is the last of several that are accumulated, those before run again, too.
            accumulated = max(step.run.batches_a_step, self._window.loader_batches)
            partition.has_lone = range(step.batch_idx - accumulated + 1, step.batch_idx + 1)
            # A divisor that does not count makes the reported loss no mean of the micro-batches' losses.
            partition.unlike = partition.unlike or self._window.loader_batches < 2
            return
        if isinstance(error, (ForeseenElsewhereError, MistakenTotalsError)):
            return  # what foretold them is forgotten
        if isinstance(error, UnknownTotalsError):
            self._window.check(self.weighing.rules, is_unlike=True)
            partition.surveyed = partition.unlike = True
            return
        if isinstance(error, KeptConstantError):
            weighing.refuse(verdicts.constant_beside_a_kept_mean())
            self._take_over(step)
        elif isinstance(error, VaryingFactorError):
            weighing.refuse(verdicts.scaled_by(VARYING_FACTOR))
            self._take_over(step)
        elif any_rank(step.run, batch_size(step.batch) > 1 and not partition.whole):
            weighing.again(step, self._trials, min(partition.micro_batch_size, batch_size(step.batch)))
            self._take_over(step)
        if self._mismatch:
            self.sizing = self._sized(step, None)

    def dry(self, step: Step, failure: str) -> Exception:
        """The error where no smaller part can help."""
        runner, trials = self._runner, self.sizing.trials if self.sizing is not None else ()
        smallest = min(trials, key=lambda trial: trial.micro_batch_size, default=None)
        return torch.OutOfMemoryError(ran_dry(step, runner.phase, failure, smallest, runner.unsplittable))

    @property
    def _splits_by_itself(self) -> bool:
        """Whether the user has left it to the proof how parts are made and weighed."""
        return self._options.weigh_by == "auto" and self._options.split is None

    @property
    def _runs_whole(self) -> bool:
        """Whether what can't be split runs whole where it fits; a size of the user's that is wrong is refused."""
        unproven = bool(self.weighing.unproven)
        return self._splits_by_itself and (self._options.micro_batch_size == "auto" or unproven)

    def _size(self, step: Step, foreseen: Foreseen | None) -> Sizing:
        """The whole batch's, where it can't be split; else what is known, or the largest that fits."""
        if self._mismatch and self._runs_whole:
            try:
                return self.known.given(step, batch_size(step.batch))
            except BudgetError as error:
                raise BudgetError(f"{self._mismatch} Whole it does not fit: {error}") from None
        return self.known.size(step, foreseen)

    def _tuning_of(self, step: Step, sizing: Sizing) -> SizeTuning | None:
        """What finds the fastest size, where the size is open and the loss known to add up from parts."""
        if self._mismatch or not clock_may_choose(step.run):
            return None
        weighing = self.weighing
        return SizeTuning(step, self._runner, sizing, proven=lambda: weighing.proven, kept=self.known.tuned)

    def _settle(self, step: Step) -> None:
        """Let the probe decide how this batch's parts are weighed, where that is still open."""
        partition = self._runner.partition
        size = partition.micro_batch_size if self.tuning is None else self.tuning.probed_size
        self.weighing.fewest = partition.fewest
        self.weighing.settle(step, self._trials, size)
        self._take_over(step)

    def _take_over(self, step: Step) -> None:
        weighing, partition = self.weighing, self._runner.partition
        partition.weigh = weigher(weighing.weigh_by, step.batch)
        partition.rules, partition.foretold = weighing.rules, weighing.foretold
        partition.unlike, partition.rests = partition.unlike or weighing.unlike, weighing.rests
        self._window.check(weighing.rules, is_unlike=partition.unlike)
        partition.held, partition.state = weighing.skipped, weighing.state
        partition.summed = weighing.weigh_by == "sum"
        self._runner.values.logs, self._runner.values.returned = weighing.logs, weighing.returned

    @property
    def _mismatch(self) -> str:
        """Why the loss can't be split, and what to do; empty where it can, or nothing is known."""
        return why_whole(self.weighing, by_itself=self._splits_by_itself)

    def _check(self, *, splits: bool) -> None:
        """Refuse to split by guess; warn where the user decided otherwise, and say what runs whole."""
        text, options = self._mismatch, self._options
        if not text:
            return
        if not self._splits_by_itself:
            if splits:
                self._warn(f"weigh_by={options.weigh_by!r}, split={options.split!r}: {text}")
            return
        if splits and not (self.tuning is not None and self.tuning.keep_whole()):
            raise BudgetError(text)
        self._runner.unsplittable = text
        if not self._runs_whole:
            return
        self._runner.partition.micro_batch_size = WHOLE
        if options.micro_batch_size != "auto" and options.micro_batch_size < self._sized_for:
            self._warn(f"MemoryBudget runs batches whole, not in parts of {options.micro_batch_size}: {text}")

    def _warn(self, text: str) -> None:
        if text != self._warned:
            self._warned = text
            warnings.warn(text, stacklevel=2)

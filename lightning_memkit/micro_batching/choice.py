"""Decide how a run's batches are split: whether they may be, how large micro-batches are, and what they weigh."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lightning_memkit.memory.sizing import Sizing
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.micro_batching import SplitError, batch_size
from lightning_memkit.micro_batching.history import WHOLE
from lightning_memkit.micro_batching.misfits import Misfits, warn_of_all
from lightning_memkit.micro_batching.options import BudgetOptions
from lightning_memkit.micro_batching.parts.by_tokens import form_by_tokens
from lightning_memkit.micro_batching.parts.runner import PartsRunner
from lightning_memkit.micro_batching.proof import verdicts
from lightning_memkit.micro_batching.proof.late_changes import look_again, note_loss
from lightning_memkit.micro_batching.proof.probe import Weighing
from lightning_memkit.micro_batching.proof.trials import Trials
from lightning_memkit.micro_batching.ranks.agreement import any_rank, largest_of_ranks
from lightning_memkit.micro_batching.ranks.worst import worst_of_ranks
from lightning_memkit.micro_batching.repeats import is_only_repeated
from lightning_memkit.micro_batching.run import Step
from lightning_memkit.micro_batching.shares import foreseen as errors
from lightning_memkit.micro_batching.sizes.known import KnownSizes
from lightning_memkit.micro_batching.sizes.long_rows import LongRows
from lightning_memkit.micro_batching.sizes.shortfall import ran_dry
from lightning_memkit.micro_batching.sizes.sizing import BudgetError, Foreseen
from lightning_memkit.micro_batching.sizes.tuning import SizeTuning, clock_may_choose
from lightning_memkit.micro_batching.sizes.whole_batches import WholeBatches
from lightning_memkit.micro_batching.sizes.window import AccumulationWindow


class PartsChoice:
    """Decides how a runner splits: before step 1 by probe and measurement, later if a batch has `Novelties`.

    Args:
        options: what the user asks for.
        runner: runs batches in micro-batches; its partition is updated here.
        trials: run steps that leave no trace.
        window: how many loader batches make an optimizer step.
        resumed: the state of the run that is resumed, whose size is used again.
        foresee: predicts the peaks of sizes; None where a prediction is impossible or costs more than it saves.

    Attributes:
        sizing: the verified size, None before step 1.
        tuning: times sizes until the fastest is known; None where the size is not open.
        weighing: what was proven of the loss.
        known: sizes of earlier runs, and predictions.
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
        self._long_rows = LongRows(options, runner, trials, resumed)
        self._whole = WholeBatches(options, runner, trials, self.known, self._long_rows, resumed)
        self._misfits = Misfits(runner.partition, self.known)
        self._warned = ""
        self._sized_for = 0  # samples of the largest batch measured

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run uses again: the size in use, or the sizes that are still being timed."""
        partition, tuning = self._runner.partition, self.tuning
        return {
            "micro_batch_size": self.size_in_use if tuning is None else self._at_most_whole(tuning.size),
            "open_sizes": list(tuning.sizes) if tuning is not None and tuning.fastest.settled is None else [],
            "holds": partition.micro_batch_size,
            "given": self._options.micro_batch_size,
            "by_tokens": partition.row_tokens is not None,
            "row_tokens": partition.row_tokens,
            "wide": sorted(partition.wide),
            "chunk_rows": partition.chunk_rows,
            "chunk_tokens": partition.chunk_tokens,
        }

    @property
    def size_in_use(self) -> int:
        """The most samples in a micro-batch; while batches run whole, those of the largest one so far."""
        return self._at_most_whole(self._runner.partition.micro_batch_size)

    def _at_most_whole(self, size: int) -> int:
        return min(size, self._sized_for or size)

    @property
    def faster_than_larger_ones(self) -> int | None:
        """The size that was timed to be the fastest, if larger ones fit; else None."""
        fastest = self.tuning.fastest if self.tuning is not None else None
        return None if fastest is None or fastest.held_by_memory else fastest.settled

    def timed(self, step: Step) -> AbstractContextManager[None]:
        """Encloses a batch's step, which is timed while sizes are tuned."""
        tuning = None if self._runner.partition.misfit else self.tuning
        return nullcontext() if tuning is None else tuning.timed(step)

    def before_first(self, step: Step) -> Sizing:
        """Probe the loss, measure peaks, choose a size.

        Raises:
            BudgetError: nothing fits the budget, or the loss can't be split.
        """
        with step.run.scanned_once():
            self.sizing = self._first(step)
        budget, weighed = format_bytes(self._options.budget_bytes), verdicts.weighed_by(self.weighing)
        step.run.info(f"MemoryBudget: {self.sizing}; budget {budget}, weighed by {weighed}.")
        return self.sizing

    def _first(self, step: Step) -> Sizing:
        options, partition = self._options, self._runner.partition
        try:
            total = batch_size(step.batch)
        except SplitError as error:
            warn_of_all(error, options.micro_batch_size)
            sizing = self.known.whole(step, why=str(error))
            partition.never_split(str(error))
            return sizing
        self._window.open(step.run, total)
        if options.within == "modules":
            self.weighing.refuse(verdicts.WITHIN_MODULES)
        else:  # first, as the probe's backward may end what forks can do
            self.known.look(step, total)
        self._settle(step)
        if options.micro_batch_size != "auto" and not self._runs_whole:
            self._check(step, splits=options.micro_batch_size < total)
        sizing = self._sized(step, self.known.foreseen)
        is_open = bool(self._resumed.get("open_sizes"))
        if sizing.chunk_tokens is None and (is_open or self._resumed.get("by_tokens", True)):
            form_by_tokens(step, self._trials, partition, options.usable_bytes, self.known.resumed_tokens)
        self.tuning = self._tuning_of(step, sizing)
        return sizing

    def _sized(self, step: Step, foreseen: Foreseen | None) -> Sizing:
        """Set the whole batch where it can't be split; else a known size, the most that fits, or a row in chunks."""
        partition, total = self._runner.partition, batch_size(step.batch)
        self._whole.look_for_given(step, self._mismatch)
        if self._mismatch and self._runs_whole:
            sizing = self._whole.sizing(step, self._mismatch)
        else:
            sizing = self._long_rows.unless_fits(step, lambda: self.known.size(step, foreseen), foreseen)
        self._sized_for = int(largest_of_ranks(step.run, [total])[0])
        partition.resize(self.known.for_later(sizing, self._sized_for))
        self._check(step, splits=sizing.micro_batch_size < total)
        return sizing

    def before_later(self, step: Step) -> None:
        """Probe a batch that has `Novelties`; measure one that is larger than all before, unless it is split.

        Raises:
            BudgetError: the batch shows that the loss can't be split, and whole it does not fit.
        """
        partition = self._runner.partition
        if partition.whole:
            return
        if self._misfits.are_in(step, micro_batches=-(-self._sized_for // self.size_in_use)):
            return
        known = self._mismatch
        self._settle(step)
        total = batch_size(step.batch)
        grown = any_rank(step.run, total > self._sized_for) and partition.micro_batch_size >= self._sized_for
        found = self._mismatch and not known and self._runs_whole
        if (grown and (self._options.has_open_size or self._runs_whole)) or found:
            self.sizing = self._sized(step, None)
        else:
            self._check(step, splits=partition.micro_batch_size < total and not partition.held)

    def reconsider(self, step: Step, error: errors.ForeseenWronglyError, *, last: bool) -> None:
        """Draw the consequence of a batch whose loss was not the one that was proven, before the batch runs again.

        Args:
            step: the batch's step.
            error: what was wrong on this rank. All ranks act on the worst of their errors.
            last: this batch has failed so often that batches run whole from here on.

        Raises:
            BudgetError: the loss can't be split, and whole the batch does not fit.
        """
        partition, weighing = self._runner.partition, self.weighing
        error = worst_of_ranks(step.run, error)
        misfit = self._misfits.why_unprobed(step)
        if last:
            weighing.refuse(verdicts.never_as_foreseen(str(error)))
            self._take_over(step)
            if misfit:  # of unknown size
                partition.never_split(self._mismatch)
            else:
                self.sizing = self._sized(step, None)
            return
        if is_only_repeated(step, error, partition, self._window):
            return
        if isinstance(error, errors.UnknownTotalsError):
            self._window.check(self.weighing.rules, is_unlike=True)
            partition.survey_each_batch()
            return
        if misfit:
            partition.fit(misfit)
            return
        verdict = verdicts.shown_by(error)
        if isinstance(error, errors.UnequalDrawsError):
            weighing.unproven = verdicts.DRAWS_BY_ROWS
            self._take_over(step)
        elif verdict is not None:
            weighing.refuse(verdict)
            self._take_over(step)
        elif isinstance(error, errors.StateChangedError):
            look_again(step, error, weighing, self._trials, partition.micro_batch_size)
            self._take_over(step)
        elif any_rank(step.run, batch_size(step.batch) > 1 and not partition.whole):
            note_loss(error, weighing)
            probes = weighing.probes
            weighing.again(step, self._trials, min(partition.micro_batch_size, batch_size(step.batch)))
            self._runner.whole.due = True
            # Rows that count nothing tell nothing of a loss that earlier batches haven't shown.
            weighing.skipped |= type(error) is errors.UnforeseenLossError and weighing.probes == probes
            self._take_over(step)
        if self._mismatch:
            self.sizing = self._sized(step, None)

    def dry(self, step: Step, failure: str) -> Exception | None:
        """The error to raise when no smaller micro-batch can help; None where modules run in chunks from here on."""
        if self._whole.rescue(step) or self._long_rows.rescue(step):
            return None
        trials = self.sizing.trials if self.sizing is not None else ()
        smallest = min(trials, key=lambda trial: trial.micro_batch_size, default=None)
        words = ran_dry(step, self._runner.phase, failure, smallest, self._runner.partition.why_whole)
        return torch.OutOfMemoryError(words)

    @property
    def _runs_whole(self) -> bool:
        """Whether a batch that can't be split may run whole; else the user's size, which splits it, is refused."""
        return self._options.wants_proof and (self._whole.may_run or bool(self.weighing.unproven))

    def _tuning_of(self, step: Step, sizing: Sizing) -> SizeTuning | None:
        """Times sizes, where the size is open and the loss is known to add up; else None."""
        if self._mismatch or sizing.chunk_tokens is not None or not clock_may_choose(step.run):
            return None
        weighing = self.weighing
        return SizeTuning(step, self._runner, sizing, proven=lambda: weighing.proven, kept=self.known.tuned)

    def _settle(self, step: Step) -> None:
        """Probe how this batch's micro-batches are weighed, where that is still open."""
        partition = self._runner.partition
        size = partition.micro_batch_size if self.tuning is None else self.tuning.probed_size
        self.weighing.fewest, probes = partition.fewest, self.weighing.probes
        self.weighing.settle(step, self._trials, size)
        self._runner.whole.due |= self.weighing.has_more or self.weighing.probes != probes
        self._take_over(step)
        self._whole.look_for_given(step, self._mismatch)

    def _take_over(self, step: Step) -> None:
        weighing, partition = self.weighing, self._runner.partition
        partition.combine_by(weighing.combination(step.batch), held=weighing.skipped, unlike=weighing.unlike)
        self._window.check(weighing.rules, is_unlike=partition.unlike)
        self._runner.draws = draws = self._trials.draws
        draws.required = self._options.wants_proof and self._trials.ranks.compares
        self._runner.values.logs, self._runner.values.returned = weighing.logs, weighing.returned

    @property
    def _mismatch(self) -> str:
        """Why the loss can't be split, and the remedy; empty where it can be, or nothing is known."""
        return verdicts.why_whole(self.weighing, by_itself=self._options.wants_proof)

    def _check(self, step: Step, *, splits: bool) -> None:
        """Refuse to split on a guess; warn where the user insists, and say that batches run whole."""
        text, options = self._mismatch, self._options
        if not text:
            return
        if not self._options.wants_proof:
            if splits:
                self._warn(f"weigh_by={options.weigh_by!r}, split={options.split!r}: {text}")
            return
        split, rows = largest_of_ranks(step.run, [splits, batch_size(step.batch)])
        if split and not (self.tuning is not None and self.tuning.keep_whole(int(rows))):
            failure = self._whole.failure_in_parts(step, self.weighing.verdict)
            raise BudgetError(text + self._whole.why_none()) from failure
        self._runner.partition.stop_splitting(text)
        if self._runs_whole:
            self._runner.partition.resize(WHOLE)
            if not self._whole.may_run and (size := int(options.micro_batch_size)) < self._sized_for:
                self._warn(f"MemoryBudget runs batches whole, not in micro-batches of {size}: {text}")

    def _warn(self, text: str) -> None:
        if text != self._warned:
            self._warned = text
            warnings.warn(text, stacklevel=2)

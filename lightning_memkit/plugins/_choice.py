"""Decide how a run's batches are split: what parts weigh, how large they are, and whether they may be taken at all."""

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_memkit.memory.sizing import Sizing, part_sizes
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.micro_batching import SplitError, WeighBy, Weigher, batch_size, weigher
from lightning_memkit.plugins import _seam
from lightning_memkit.plugins._forecast import Foreseen, foreseen
from lightning_memkit.plugins._options import BudgetOptions
from lightning_memkit.plugins._parts import PartsRunner
from lightning_memkit.plugins._probe import Weighing
from lightning_memkit.plugins._shortfall import ran_dry
from lightning_memkit.plugins._sizing import AccumulationWindow, BudgetError, choose_size, verify_whole
from lightning_memkit.plugins._token_parts import form_by_tokens
from lightning_memkit.plugins._trials import Trials
from lightning_memkit.plugins._tuned_sizes import TunedSize, TunedSizes, question_of
from lightning_memkit.plugins._tuning import SizeTuning, clock_may_choose
from lightning_memkit.plugins._worst_batch import scanned_once


class PartsChoice:
    """Sets a runner's partition: before step 1 by probe and measurement, later by probes of what is new in a batch.

    Args:
        options: what the user wants.
        runner: runs batches in parts; its partition is set here.
        trials: run the steps that leave no trace.
        window: how many loader batches make a step.
        resumed: the state of the run that is resumed: its size is repeated.

    Attributes:
        sizing: the size that was verified before step 1, None before.
        tuning: what finds the fastest size; None where nothing is left to be found.
    """

    def __init__(
        self,
        options: BudgetOptions,
        runner: PartsRunner,
        trials: Trials,
        window: AccumulationWindow,
        resumed: Mapping[str, Any],
    ) -> None:
        self.sizing: Sizing | None = None
        self.tuning: SizeTuning | None = None
        self.weighing = Weighing(options.weigh_by, options.split)
        self._options = options
        self._runner = runner
        self._trials = trials
        self._window = window
        self._resumed = resumed
        self.foreseen: Foreseen | None = None
        self._tuned_sizes: TunedSizes | None = None
        self._remembered: TunedSize | None = None
        self._warned = ""
        self._keeps_rows = False  # as the resumed run did, where parts formed by tokens had run out of memory

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run repeats: the size in use, or the sizes of which the clock has still to choose one."""
        partition, tuning = self._runner.partition, self.tuning
        under_way = tuning is not None and tuning.fastest.settled is None
        return {
            "micro_batch_size": tuning.size if tuning is not None else partition.micro_batch_size,
            "open_sizes": list(tuning.sizes) if tuning is not None and under_way else [],
            "by_tokens": partition.row_tokens is not None,
        }

    @property
    def faster_than_larger_ones(self) -> int | None:
        """The size that the clock has chosen, if larger ones fit and are slower."""
        fastest = self.tuning.fastest if self.tuning is not None else None
        return None if fastest is None or fastest.held_by_memory else fastest.settled

    def timed(self, step: _seam.Step) -> AbstractContextManager[None]:
        """Encloses a batch's step, whose time may decide."""
        return nullcontext() if self.tuning is None else self.tuning.timed(step)

    def before_first(self, step: _seam.Step) -> Sizing:
        """Probe, measure, choose.

        Raises:
            BudgetError: the budget can't hold what has to be held, or the loss can't be split.
        """
        with scanned_once():
            self.sizing = sizing = self._first(step)
        rank_zero_info(
            f"MemoryBudget: {sizing}; budget {format_bytes(self._options.budget_bytes)}, weighed by "
            f"{_described(self.weighing.weigh_by)}."
        )
        return sizing

    def _first(self, step: _seam.Step) -> Sizing:
        options, partition = self._options, self._runner.partition
        try:
            total = batch_size(step.batch)
        except SplitError as error:
            if options.micro_batch_size != "auto":
                raise
            warnings.warn(f"MemoryBudget runs batches whole: {error}", stacklevel=2)
            sizing = verify_whole(step, self._trials, **self._known, why=str(error))
            partition.whole, self._runner.unsplittable = True, str(error)
            return sizing
        self._window.open(step.trainer, total)
        self.foreseen = foreseen = self._foresee(
            step, total
        )  # the probe's backward may end what forks can do
        self._settle(step)
        if options.micro_batch_size != "auto":
            self._check(splits=options.micro_batch_size < total)
        sizing = self._size(step, foreseen)
        partition.micro_batch_size = sizing.micro_batch_size
        if not self._keeps_rows:
            form_by_tokens(step, self._trials, partition, options.usable_bytes)
        self._check(splits=sizing.micro_batch_size < total)
        self.tuning = self._tuning_of(step, sizing)
        return sizing

    def before_later(self, step: _seam.Step) -> None:
        """Probe where this batch is the first to differ.

        Raises:
            BudgetError: it shows that the loss can't be split.
        """
        partition = self._runner.partition
        if not partition.whole:
            self._settle(step)
            self._check(splits=partition.micro_batch_size < batch_size(step.batch))

    def dry(self, step: _seam.Step, failure: str) -> Exception:
        """The error where no smaller part can help."""
        runner, trials = self._runner, self.sizing.trials if self.sizing is not None else ()
        if runner.unsplittable:
            return torch.OutOfMemoryError(
                f"Batch {step.batch_idx} runs out of memory {runner.phase} ({failure}) and can't be split. "
                f"{runner.unsplittable}"
            )
        smallest = min(trials, key=lambda trial: trial.micro_batch_size, default=None)
        return torch.OutOfMemoryError(ran_dry(step, runner.phase, failure, smallest))

    @property
    def _known(self) -> dict[str, Any]:
        return {"budget_bytes": self._options.budget_bytes, "headroom": self._options.headroom}

    @property
    def _all_open(self) -> bool:
        """Whether the user has left everything to the probe."""
        options = self._options
        return options.micro_batch_size == options.weigh_by == "auto" and options.split is None

    def _foresee(self, step: _seam.Step, total: int) -> Foreseen | None:
        """What is predicted, where the size is open and no earlier run has found it."""
        self._tuned_sizes = self._cache_of(step)
        self._remembered = self._tuned_sizes.recall() if self._tuned_sizes is not None else None
        is_resumed = self._resumed.get("micro_batch_size") is not None
        if self._options.micro_batch_size != "auto" or is_resumed or self._remembered is not None:
            return None
        return foreseen(step, self._options, part_sizes(total))

    def _size(self, step: _seam.Step, foreseen: Foreseen | None) -> Sizing:
        """What the user says holds; else a resumed run's size, if it still fits; else the largest that fits."""
        if self._mismatch and self._all_open:
            try:
                return choose_size(step, self._trials, **self._known, given=batch_size(step.batch))
            except BudgetError as error:
                raise BudgetError(f"{self._mismatch} Whole it does not fit: {error}") from None
        if self._options.micro_batch_size == "auto" and self._resumed.get("micro_batch_size") is not None:
            sizing = self._resumed_size(step)
            if sizing is not None:
                return sizing
        remembered = self._remembered.micro_batch_size if self._remembered is not None else None
        given = self._options.micro_batch_size
        return choose_size(
            step, self._trials, **self._known, given=given, remembered=remembered, foreseen=foreseen
        )

    def _resumed_size(self, step: _seam.Step) -> Sizing | None:
        """The size of the run that is resumed; those that it was still timing, where it had not settled on one."""
        ran_out = min(self._resumed.get("larger", ()), default=float("inf"))
        still_open = tuple(int(size) for size in self._resumed.get("open_sizes", ()) if size < ran_out)
        given = max(still_open, default=int(self._resumed["micro_batch_size"]))
        try:
            sizing = choose_size(step, self._trials, **self._known, given=given)
        except BudgetError:
            warnings.warn(
                f"The resumed run's micro-batch of {given} does not fit this budget; another one is measured, "
                "and the runs differ by rounding.",
                stacklevel=2,
            )
            return None
        self._keeps_rows = not still_open and not self._resumed.get("by_tokens", True)
        smaller = tuple(size for size in still_open if size < sizing.micro_batch_size)
        return replace(sizing, candidates=(sizing.micro_batch_size, *smaller))

    def _cache_of(self, step: _seam.Step) -> TunedSizes | None:
        """Where an earlier run may have left the fastest size, if it is to be chosen at all."""
        options = self._options
        if options.micro_batch_size != "auto" or not clock_may_choose(step.trainer):
            return None
        question = question_of(step, budget=options.budget, usable_bytes=options.usable_bytes)
        return TunedSizes(step.trainer, question)

    def _tuning_of(self, step: _seam.Step, sizing: Sizing) -> SizeTuning | None:
        """What finds the fastest size, where the size is open and the loss known to add up from parts."""
        if self._mismatch or not clock_may_choose(step.trainer):
            return None
        weighing = self.weighing
        return SizeTuning(step, self._runner, sizing, proven=lambda: weighing.proven, kept=self._tuned_sizes)

    def _settle(self, step: _seam.Step) -> None:
        """Let the probe decide how this batch's parts are weighed, where that is still open."""
        weighing, partition = self.weighing, self._runner.partition
        size = partition.micro_batch_size if self.tuning is None else self.tuning.probed_size
        weighing.settle(step, self._trials, size)
        partition.weigh = weigher(weighing.weigh_by, step.batch)
        self._runner.logs = weighing.logs
        partition.summed = weighing.weigh_by == "sum"

    @property
    def _mismatch(self) -> str:
        """Why the loss can't be split, and what to do; empty where it can, or nothing is known."""
        verdict = self.weighing.verdict
        if verdict is None or verdict.adds_up:
            return ""
        by = f" by {verdict.relative_error:.1%}" if isfinite(verdict.relative_error) else ""
        return (
            f"The weighted gradients of a batch's parts miss the whole batch's{by}: {verdict.cause}. To mend it, "
            f"{verdict.remedy}."
        )

    def _check(self, *, splits: bool) -> None:
        """Refuse to split by guess; warn where the user decided, keep in mind where nothing is split yet."""
        text, options = self._mismatch, self._options
        if not text:
            return
        if options.weigh_by != "auto" or options.split is not None:
            if splits and text != self._warned:
                self._warned = text
                warnings.warn(f"weigh_by={options.weigh_by!r}, split={options.split!r}: {text}", stacklevel=2)
        elif splits and not (self.tuning is not None and self.tuning.keep_whole()):
            raise BudgetError(text)
        else:
            self._runner.unsplittable = text


def _described(weigh_by: WeighBy | Weigher) -> str:
    if not isinstance(weigh_by, str):
        return "the given callable"
    return "the batch's own count" if weigh_by == "auto" else weigh_by

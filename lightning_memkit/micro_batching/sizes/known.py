"""Sizes from the resumed run, the cache of earlier runs, or a prediction; each is verified by one trial."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_memkit.memory.sizing import Sizing, part_sizes
from lightning_memkit.micro_batching import batch_size
from lightning_memkit.micro_batching.options import BudgetOptions
from lightning_memkit.micro_batching.parts.module_chunks import ModuleChunks
from lightning_memkit.micro_batching.proof.trials import Trials
from lightning_memkit.micro_batching.ranks.agreement import largest_of_ranks
from lightning_memkit.micro_batching.run import Step
from lightning_memkit.micro_batching.sizes.peaks import ChunkSearch
from lightning_memkit.micro_batching.sizes.sizing import (
    BudgetError,
    Foreseen,
    SizeHints,
    choose_size,
    verify_whole,
)
from lightning_memkit.micro_batching.sizes.tuned_sizes import TunedSize, TunedSizes, question_of
from lightning_memkit.micro_batching.sizes.tuning import clock_may_choose


class KnownSizes:
    """Finds a size from earlier runs or from a prediction; it is verified before use.

    Args:
        options: the options of the `MemoryBudget`.
        trials: verifies a size.
        resumed: the state of the run that is resumed, whose size is used again.
        foresee: predicts the peaks of sizes; returns None if that is impossible or not worth its time.

    Attributes:
        foreseen: the prediction; None before `look`, or if there is none.
        tuned: the cache of the fastest size; None unless the size may be chosen by time.
    """

    def __init__(
        self,
        options: BudgetOptions,
        trials: Trials,
        resumed: Mapping[str, Any],
        foresee: Callable[[Step, Sequence[int]], Foreseen | None],
    ) -> None:
        self._options, self._trials, self._resumed, self._predict = options, trials, resumed, foresee
        self.foreseen: Foreseen | None = None
        self.tuned: TunedSizes | None = None
        self._remembered: TunedSize | None = None

    def look(self, step: Step, total: int) -> None:
        """Look into the cache; predict peaks if neither user, resumed run nor cache gives a size."""
        self.tuned = self._cache_of(step)
        self._remembered = self.tuned.recall() if self.tuned is not None else None
        is_resumed = self._resumed.get("micro_batch_size") is not None
        if self._options.micro_batch_size != "auto" or is_resumed or self._remembered is not None:
            return
        self.foreseen = self._predict(step, part_sizes(total))

    def given(self, step: Step, size: int) -> Sizing:
        """Verify a given size.

        Raises:
            BudgetError: it does not fit.
        """
        return choose_size(step, self._trials, self._options, given=size)

    def chunks(self, step: Step, chunks: ModuleChunks, rows: int | None) -> Sizing:
        """The rows of a chunk: those in use, the resumed run's or the user's if they fit, or the most that do.

        Raises:
            BudgetError: not even one row at a time fits, or the user's number does not.
        """
        user, known = self._options.micro_batch_size, rows or self._resumed.get("chunk_rows")
        hints, total = (
            SizeHints(remembered=known),
            int(largest_of_ranks(step.run, [batch_size(step.batch)])[0]),
        )
        search = ChunkSearch(modules=chunks, axis="rows", most=total, rows=total)
        return choose_size(step, self._trials, self._options, given=user, hints=hints, chunks=search)

    def whole(self, step: Step, *, why: str) -> Sizing:
        """Verify a batch that has no rows to split.

        Raises:
            BudgetError: it does not fit; `why` says why it is not split.
        """
        return verify_whole(step, self._trials, self._options, why=why)

    def size(self, step: Step, foreseen: Foreseen | None) -> Sizing:
        """The resumed run's size if `micro_batch_size` is "auto" or unchanged and it fits; else another.

        The other is the user's, or with "auto" the cached one or the largest that fits.
        """
        given = self._options.micro_batch_size
        repeats = given == "auto" or given == self._resumed.get("given")  # else the user has changed it
        if repeats and self._resumed.get("micro_batch_size") is not None:
            sizing = self._resumed_size(step)
            if sizing is not None:
                return sizing
        remembered = self._remembered.micro_batch_size if self._remembered is not None else None
        hints = SizeHints(remembered=remembered, foreseen=foreseen)
        return choose_size(step, self._trials, self._options, given=given, hints=hints)

    def for_later(self, sizing: Sizing, rows: int) -> int:
        """The size for this batch and for larger ones: the user's, where it holds all of these rows.

        A resumed run's, which may be smaller after an OOM, where the user has not changed it.
        """
        given, size, resumed = self._options.micro_batch_size, sizing.micro_batch_size, self._resumed
        if self._options.has_open_size or given == "auto" or size < rows:
            return size
        known = (
            resumed.get("holds", resumed.get("micro_batch_size")) if given == resumed.get("given") else None
        )
        return max(size, given if known is None else min(given, int(known)))

    def _resumed_size(self, step: Step) -> Sizing | None:
        """The resumed run's size; if it had not finished tuning, the sizes that it was still timing."""
        ran_out = min(self._resumed.get("larger", ()), default=float("inf"))
        still_open = tuple(int(size) for size in self._resumed.get("open_sizes", ()) if size < ran_out)
        given = max(still_open, default=int(self._resumed["micro_batch_size"]))
        try:
            sizing = choose_size(step, self._trials, self._options, given=given)
        except BudgetError:
            warnings.warn(
                f"The resumed run's micro-batch of {given} does not fit this budget; another one is measured, "
                "and the runs differ by rounding.",
                stacklevel=2,
            )
            return None
        smaller = tuple(size for size in still_open if size < sizing.micro_batch_size)
        return replace(sizing, candidates=(sizing.micro_batch_size, *smaller))

    @property
    def resumed_tokens(self) -> tuple[int, frozenset[str]] | None:
        """How the resumed run formed micro-batches by tokens (see `Partition`); None if it did not."""
        row_tokens = self._resumed.get("row_tokens")
        return None if row_tokens is None else (int(row_tokens), frozenset(self._resumed.get("wide", ())))

    def _cache_of(self, step: Step) -> TunedSizes | None:
        """The cache of the fastest size; None if the user has given a size, or time may not choose it."""
        options = self._options
        if options.micro_batch_size != "auto" or not clock_may_choose(step.run):
            return None
        question = question_of(step, budget=options.budget, usable_bytes=options.usable_bytes)
        return TunedSizes(step.run, question)

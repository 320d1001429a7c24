"""Make room for batches that can't be split: as they are where that fits, else with modules in chunks of rows."""

import warnings
from collections.abc import Mapping
from typing import Any

from lightning_memkit.memory.sizing import Sizing
from lightning_memkit.micro_batching import batch_size
from lightning_memkit.micro_batching.options import BudgetOptions
from lightning_memkit.micro_batching.parts.runner import PartsRunner
from lightning_memkit.micro_batching.proof.decomposability import Verdict
from lightning_memkit.micro_batching.proof.trials import Trials
from lightning_memkit.micro_batching.proof.verdicts import without_remedy
from lightning_memkit.micro_batching.ranks.agreement import largest_of_ranks
from lightning_memkit.micro_batching.run import Step
from lightning_memkit.micro_batching.sizes.known import KnownSizes
from lightning_memkit.micro_batching.sizes.long_rows import LongRows
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from lightning_memkit.utilities.errors import NoEffectWarning


class WholeBatches:
    """Decides whether modules run in chunks while batches run whole, and of how many rows.

    Args:
        options: what the user asks for.
        runner: runs the batches; its partition and its chunks are set here.
        trials: run steps that leave no trace.
        known: measures peaks.
        long_rows: makes room where even chunks of one row don't fit.
        resumed: the state of the run that is resumed, whose chunks are used again.

    Attributes:
        may_run: the user has given no size that would split them, or it has become the rows of a chunk.
    """

    def __init__(
        self,
        options: BudgetOptions,
        runner: PartsRunner,
        trials: Trials,
        known: KnownSizes,
        long_rows: LongRows,
        resumed: Mapping[str, Any],
    ) -> None:
        self._options, self._runner, self._trials, self._known = options, runner, trials, known
        self._long_rows = long_rows
        self._resumed = resumed
        self.may_run = options.has_open_size

    def sizing(self, step: Step, mismatch: str) -> Sizing:
        """Measure the whole batch; where it does not fit, find modules and the most rows of a chunk that fit.

        Where one row does not fit either, chunks are of tokens.

        Args:
            step: the batch's step.
            mismatch: why it can't be split.

        Raises:
            BudgetError: it fits in neither way.
        """
        partition = self._runner.partition
        is_given = self._options.micro_batch_size != "auto" and self._options.within != "step"
        had = partition.chunk_rows is not None or bool(self._resumed.get("chunk_rows"))
        if self._long_rows.in_use:
            self._find(step)
            if (sizing := self._long_rows.sizing(step, whole=True)) is not None:
                return sizing
        if (had or is_given) and self._find(step):
            return self._in_chunks(step, mismatch)
        try:
            sizing = self._known.given(step, batch_size(step.batch))
        except BudgetError as error:
            if self._find(step):
                return self._in_chunks(step, mismatch)
            sizing = self._of_tokens(step, mismatch)
            if sizing is not None:
                return sizing
            raise BudgetError(f"{mismatch} Whole it does not fit: {error}{self.why_none()}") from None
        if is_given and self._options.within == "modules":
            warnings.warn(
                f"micro_batch_size={self._options.micro_batch_size} has no effect, and batches run whole."
                f"{self.why_none()}",
                NoEffectWarning,
                stacklevel=2,
            )
        return sizing

    def _in_chunks(self, step: Step, mismatch: str) -> Sizing:
        """The rows of a chunk, as known or the most that fit."""
        partition, chunks = self._runner.partition, self._runner.chunks
        try:
            sizing = self._known.chunks(step, chunks, partition.chunk_rows)
        except BudgetError as error:
            of_tokens = self._of_tokens(step, mismatch) if self._options.micro_batch_size == "auto" else None
            if of_tokens is not None:
                return of_tokens
            raise BudgetError(f"{mismatch} Whole it does not fit: {error}") from None
        if sizing.chunk_rows != partition.chunk_rows:
            partition.run_in_chunks(sizing.chunk_rows)
            chunks.resize(sizing.chunk_rows, None)
            step.run.info(
                f"MemoryBudget: batches run whole, {chunks}, recomputed in the backward. {without_remedy(mismatch)}"
            )
        return sizing

    def _of_tokens(self, step: Step, mismatch: str) -> Sizing | None:
        """The tokens of a chunk, where one row does not fit; None where no module takes tokens one by one."""
        try:
            return self._long_rows.sizing(step, whole=True)
        except BudgetError as error:
            raise BudgetError(f"{mismatch} Whole it does not fit: {error}") from None

    def why_none(self) -> str:
        """Why no modules run in chunks; empty where they were not to."""
        if self._options.within == "step":
            return ""
        return self._runner.chunks.fails or " No module in it treats its rows independently."

    def failure_in_parts(self, step: Step, verdict: Verdict | None) -> Exception | None:
        """What the step raised on a micro-batch, if that is why batches can't be split.

        Raises:
            Exception: the user's own, where the step fails on the whole batch, too.
        """
        if verdict is None or verdict.failure is None:
            return None
        self._trials.peak_of(step, step.batch, [], self._options.usable_bytes)
        return verdict.failure

    def rescue(self, step: Step) -> bool:
        """After a whole batch ran out of memory: run modules in chunks of half its rows; False if there are none."""
        partition = self._runner.partition
        if (
            not partition.unsplittable
            or partition.whole
            or partition.chunk_rows is not None
            or not self._find(step)
        ):
            return False
        partition.run_in_chunks((batch_size(step.batch) + 1) // 2)
        return True

    def look_for_given(self, step: Step, mismatch: str) -> None:
        """Where the user's size would split a batch that can't be, look for modules to run in chunks of that size."""
        options = self._options
        # Of several batches that are weighed as one, no loss of its own is exact.
        if mismatch and options.wants_proof and options.effective_batch_size is None and not self.may_run:
            rows = int(largest_of_ranks(step.run, [batch_size(step.batch)])[0])
            self.may_run = rows > int(options.micro_batch_size) and self._find(step)

    def _find(self, step: Step) -> bool:
        return self._options.within != "step" and self._runner.chunks.find(step, self._trials, "rows")

"""Make room for rows that don't fit, not even one: modules that take tokens one by one run in chunks of tokens."""

from collections.abc import Callable, Mapping
from typing import Any

from lightning_memkit.memory.sizing import Sizing
from lightning_memkit.micro_batching import batch_size
from lightning_memkit.micro_batching.options import BudgetOptions
from lightning_memkit.micro_batching.parts.runner import PartsRunner
from lightning_memkit.micro_batching.proof.trial_values import StepFailedError
from lightning_memkit.micro_batching.proof.trials import Trials
from lightning_memkit.micro_batching.ranks.agreement import largest_of_ranks
from lightning_memkit.micro_batching.run import Step
from lightning_memkit.micro_batching.sizes.peaks import ChunkSearch
from lightning_memkit.micro_batching.sizes.sizing import BudgetError, Foreseen, SizeHints, choose_size


class LongRows:
    """Decides of how many tokens chunks are, where the smallest micro-batch, or chunk of rows, does not fit.

    Args:
        options: what the user asks for.
        runner: runs the batches; its partition and its chunks are set here.
        trials: run steps that leave no trace.
        resumed: the state of the run that is resumed, whose chunks are used again.
    """

    def __init__(
        self, options: BudgetOptions, runner: PartsRunner, trials: Trials, resumed: Mapping[str, Any]
    ) -> None:
        self._options, self._runner, self._trials, self._resumed = options, runner, trials, resumed

    @property
    def in_use(self) -> bool:
        """Whether rows run in chunks of tokens, or did in the run that is resumed."""
        known = self._resumed.get("chunk_tokens") is not None and self._options.within != "step"
        return self._runner.partition.chunk_tokens is not None or known

    def sizing(self, step: Step, *, whole: bool, foreseen: Foreseen | None = None) -> Sizing | None:
        """The tokens of a chunk: as known, or the most of those tried that fit; None where no module takes them alone.

        Args:
            step: the batch's step.
            whole: the batch can't be split.
            foreseen: what was predicted to fit instead, for the error.

        Raises:
            BudgetError: even the smallest chunk does not fit.
        """
        if not self._find(step):
            return None
        partition, chunks = self._runner.partition, self._runner.chunks
        rows = 1 if whole and chunks.names.get("rows") else None
        given = self._options.micro_batch_size
        search = ChunkSearch(
            modules=chunks,
            axis="tokens",
            most=chunks.tokens,
            rows=self._rows(step) if whole else 1 if given == "auto" else int(given),
            chunk_rows=rows,
        )
        hints = SizeHints(
            remembered=partition.chunk_tokens or self._resumed.get("chunk_tokens"),
            foreseen=None if foreseen is None else Foreseen(remedy=foreseen.remedy),
        )
        before = partition.chunk_rows, partition.chunk_tokens
        try:
            sizing = choose_size(step, self._trials, self._options, given="auto", hints=hints, chunks=search)
        except (BudgetError, StepFailedError) as error:
            chunks.resize(*before)
            if isinstance(error, BudgetError):
                raise
            return None  # the step takes more than one row
        partition.run_in_chunks(sizing.chunk_rows, sizing.chunk_tokens)
        chunks.resize(sizing.chunk_rows, sizing.chunk_tokens)
        if before != (sizing.chunk_rows, sizing.chunk_tokens):
            step.run.info(f"MemoryBudget: a row does not fit at once; {chunks}, recomputed in the backward.")
        return sizing

    def unless_fits(self, step: Step, of_rows: Callable[[], Sizing], foreseen: Foreseen | None) -> Sizing:
        """The sizing of micro-batches of rows; where none fits, or chunks of tokens are in use, the sizing of these.

        Args:
            step: the batch's step.
            of_rows: measures micro-batches.
            foreseen: what was predicted.

        Raises:
            BudgetError: neither fits.
        """
        if self.in_use and (sizing := self.sizing(step, whole=False)) is not None:
            return sizing
        try:
            return of_rows()
        except BudgetError as error:
            sizing = self.sizing(step, whole=False, foreseen=foreseen)
            if sizing is None:
                raise BudgetError(f"{error}{self._runner.chunks.fails}") from None
            return sizing

    def rescue(self, step: Step) -> bool:
        """After the smallest part of a batch ran out of memory: use chunks of half a row; False if none are found."""
        partition = self._runner.partition
        has_rows = not (partition.whole or partition.misfit)
        if partition.chunk_tokens is not None or not has_rows or not self._find(step):
            return False
        partition.run_in_chunks(partition.chunk_rows, (self._runner.chunks.tokens + 1) // 2)
        return True

    def _rows(self, step: Step) -> int:
        return int(largest_of_ranks(step.run, [batch_size(step.batch)])[0])

    def _find(self, step: Step) -> bool:
        return self._options.within != "step" and self._runner.chunks.find(step, self._trials, "tokens")

"""Modules in chunks of rows, for batches that can't be split: the step sees the whole batch's outputs."""

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_memkit.activations.chunks.finding import find_chunkable
from lightning_memkit.activations.chunks.forwards import ChunkedForwards, ChunkSizes
from lightning_memkit.distributed.collectives import collectives_issued
from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching import batch_size, split_batch
from lightning_memkit.micro_batching.ranks.agreement import any_rank
from lightning_memkit.micro_batching.run import Run, Step
from lightning_memkit.utilities.patching import Undo

if TYPE_CHECKING:
    from lightning_memkit.micro_batching.proof.trials import Trials

_ASKED_ROWS = (8, 32, 2)  # of the batch, in the step that finds the modules; more where it fails on so few


class ModuleChunks:
    """The modules of a run whose rows are independent, found where they are needed.

    Args:
        run: the training loop.

    Attributes:
        names: of the modules that run in chunks; None before they were looked for.
    """

    def __init__(self, run: Run) -> None:
        self.names: tuple[str, ...] | None = None
        self._run = run
        self._sizes = ChunkSizes()
        self._undo: list[Undo] = []

    def __str__(self) -> str:
        names = self.names or ()
        shown = ", ".join(names[:3])
        shown = f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
        rows = self._sizes.rows
        return shown if rows is None else f"{shown} in chunks of {rows} {'row' if rows == 1 else 'rows'}"

    def find(self, step: Step, trials: "Trials") -> bool:
        """Find the modules by trials on a few rows, and patch them; whether there are any. All ranks must call it.

        None are looked for where ranks communicate in each forward (FSDP2): what one rank asks, all would have to.
        """
        if self.names is None and self._run.meets_in_every_micro_batch:
            self.names = ()
        if self.names is None:
            found, part = self._found(step, trials)
            self.names = self._run.of_first_rank(lambda: found)
            # In evaluation there is no backward to recompute in; and what can't be chunked then runs as it is.
            forwards = ChunkedForwards(self._sizes, refuses=False, only_with_gradient=True)
            modules = dict(self._run.module.named_modules())
            self._undo = [forwards.patch(modules[name]) for name in self.names]
            # The first call in chunks asks each module once more, and DDP makes its buckets anew in the second forward
            # after a backward: here, and not within a trial that measures.
            self.resize(1)
            for _ in range(2 if self.names else 0):
                with suppress(Exception), trials.no_trace(step, part, seen=True):
                    trials.run(step, part)
            self.resize(None)
        return bool(self.names)

    def resize(self, rows: int | None) -> None:
        """Put at most so many rows into a chunk; None for all."""
        self._sizes.rows = rows

    def close(self) -> None:
        """Put the modules' own forwards back."""
        while self._undo:
            self._undo.pop()()
        self.names = None

    def _found(self, step: Step, trials: "Trials") -> tuple[tuple[str, ...], Any]:
        """The names of the modules, and the rows on which they were found."""
        total, part = batch_size(step.batch), step.batch
        for rows in _ASKED_ROWS:
            part = step.batch if rows >= total else split_batch(step.batch, [rows, total - rows])[0]
            found: tuple[str, ...] = ()
            asked = partial(self._run_rows, step, part)
            with suppress(Exception), trials.no_trace(step, part, seen=True):
                modules = find_chunkable(self._run.module, asked, "rows", collectives_issued)
                found = tuple(one.name for one in modules)
            if any_rank(self._run, bool(found)):  # the same number of steps on each
                return found, part
        return (), part

    def _run_rows(self, step: Step, part: object) -> None:
        """The step on a few rows. Where it fails, the modules that ran before are known."""
        try:
            step.forward(self._run.transfer(part))
        except Exception as error:
            if is_out_of_memory(error):
                raise

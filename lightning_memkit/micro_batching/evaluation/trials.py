"""Trials of evaluation steps, which leave no trace: a micro-batch's peak, and whether it communicates."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from lightning_memkit.distributed.collectives import collectives_issued
from lightning_memkit.memory.measure import PeakMeter, peak_meter
from lightning_memkit.memory.meter import unmetered
from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching import (
    SplitError,
    batch_size,
    split_batch,
)
from lightning_memkit.micro_batching.evaluation.state import EvaluationRollback
from lightning_memkit.micro_batching.evaluation.step import EvaluationStep
from lightning_memkit.micro_batching.parts.cut import Splitter
from lightning_memkit.micro_batching.proof.optimizer_trial import states_on
from lightning_memkit.micro_batching.ranks.alone import Ranks
from lightning_memkit.micro_batching.run import Run
from lightning_memkit.utilities.tensors import tensors_of

T = TypeVar("T")


class EvaluationTrials:
    """Runs an evaluation step's batch without leaving a trace in module, RNG or logs.

    Args:
        run: the loop, of which evaluation is a part.
        split: the user's own splitter.
    """

    def __init__(self, run: Run, split: Splitter | None) -> None:
        self.changing: frozenset[tuple[str, str]] | None = (
            None  # the tensors that steps change; None: unknown
        )
        self.ranks = Ranks()
        self._run = run
        self._split = split

    @property
    def _gets_batch_itself(self) -> bool:
        """Whether steps get the loader's own tensors instead of copies on a device."""
        return self._run.device.type == "cpu"

    def part(self, step: EvaluationStep, run: Callable[[], T]) -> T:
        """Run one forward; if ranks communicate in it, all of them run one, and one's failure is all's."""
        return self.ranks.part(
            run, kind=f"{step.hook} {step.dataloader_idx}", smallest=lambda: self._smallest(step)
        )

    def _smallest(self, step: EvaluationStep) -> None:
        """Run a forward of one row only for its collectives."""
        batch = self.rows_of(step.batch, 1)
        with self._run.logging_held():
            step.forward(step.transfer(batch))

    def forward(self, step: EvaluationStep, batch: Any) -> Any:
        """The step's output for a batch."""
        return self.part(step, lambda: step.forward(step.transfer(batch)))

    def rows_of(self, batch: Any, size: int) -> Any:
        """The first rows of a batch, or all of one that can't be split."""
        try:
            total = batch_size(batch)
        except SplitError:
            return batch
        if size >= total:
            return batch
        return split_batch(batch, [size, total - size], split=self._split)[0]

    def communicates(self, step: EvaluationStep) -> bool:
        """Whether the user's step issues collectives; runs a forward of one row to see."""
        before = collectives_issued()
        try:
            with self.no_trace(step):
                self._smallest(step)
        except Exception as error:  # it may need hooks that run later, or more rows
            self._run.debug(f"MemoryBudget can't try a row in {step.hook}: {error!r}")
        after = collectives_issued()
        return after is None or after != before

    def repeat(self, step: EvaluationStep, batch: Any) -> None:
        """Run a forward that counts for nothing, for ranks whose batches have more micro-batches."""
        with self.no_trace(step):
            self.forward(step, batch)

    def rollback(self, step: EvaluationStep) -> EvaluationRollback:
        """The state before a batch runs: what trials saw steps change, including the batch if they do."""
        changes_batch = any(path == "batch" for path, _ in self.changing or ())
        batches = [step.batch] if changes_batch else []
        return EvaluationRollback(self._run.module, self.changing, batches=batches)

    @contextmanager
    def no_trace(self, step: EvaluationStep, *batches: Any) -> Iterator[EvaluationRollback]:
        """Run a trial inside: changes are undone and nothing is logged; `batches` are restored, too."""
        given = [step.batch, *batches] if self._gets_batch_itself else []
        rollback = EvaluationRollback(self._run.module, batches=given)
        try:
            with (
                unmetered(),
                self._run.nothing_logged(),
                rollback.watching() if self._gets_batch_itself else nullcontext(),
            ):
                yield rollback
        finally:
            try:
                self.changing = (self.changing or frozenset()) | rollback.changed()
            finally:  # also where memory runs out in comparing
                rollback.restore()

    def meter(self, step: EvaluationStep, limit: int | None) -> PeakMeter:
        """A meter that counts what else is on the device, such as gradients, optimizer and metric states."""
        device, module = self._run.device, self._run.module
        held = [tensor for owner in module.modules() for tensor in tensors_of(vars(owner))]
        held += [p.grad for p in module.parameters() if p.grad is not None]
        held += tensors_of([step.batch, step.given])
        held = [tensor for tensor in held if tensor.device.type == device.type]
        for optimizer in self._run.optimizers:
            held += states_on(device, optimizer)
        return peak_meter(device, held, limit)

    def peak_of(self, step: EvaluationStep, size: int | None, limit: int | None) -> int | None:
        """The peak of the first `size` samples (None: of the whole batch); None if memory runs out."""
        if self.ranks.meets and self.ranks.reason:
            limit = None  # stopping within a forward would leave other ranks waiting
        batch = step.batch if size is None else self.rows_of(step.batch, size)
        failed, peak = False, 0
        with self.no_trace(step, batch):
            meter = self.meter(step, limit)

            def run() -> None:
                with meter:
                    step.forward(step.transfer(batch))

            try:
                self.part(step, run)
                peak = meter.peak_bytes
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failed = True
        most = self.ranks.largest_of([float(failed), peak])
        return None if most[0] else int(most[1])

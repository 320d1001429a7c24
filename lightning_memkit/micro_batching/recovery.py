"""Retry a step that ran out of memory: restore the state before it, and run the batch in smaller micro-batches."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_memkit.memory.out_of_memory import free_memory, is_out_of_memory
from lightning_memkit.micro_batching import batch_size
from lightning_memkit.micro_batching.changes.kept_gradients import KeptGradients
from lightning_memkit.micro_batching.changes.rollback import Rollback
from lightning_memkit.micro_batching.changes.spare_copies import SpareCopies
from lightning_memkit.micro_batching.changes.step_changes import label
from lightning_memkit.micro_batching.parts.partition import Form
from lightning_memkit.micro_batching.parts.runner import PartsRunner
from lightning_memkit.micro_batching.run import Run, Step
from lightning_memkit.micro_batching.shares.foreseen import ForeseenWronglyError
from lightning_memkit.micro_batching.sizes.failed_sizes import FailedSizes
from lightning_memkit.optim.journaled_step import StepOutOfMemoryError

# Of a batch whose loss was not as proven: its functions, its totals, its terms, or several of these.
_MOST_REPEATS = 6


class Resized(Protocol):
    """A callback for a changed micro-batch size."""

    def __call__(self, step: Step, *, retry: bool) -> None:
        """Called with the step; `retry` if an OOM is the cause."""
        ...


class Reconsidered(Protocol):
    """A callback for a batch whose loss was not the one that was proven."""

    def __call__(self, step: Step, error: ForeseenWronglyError, *, last: bool) -> None:
        """Called with what was wrong; `last` if batches are not to be split any more."""
        ...


class SafePoint:
    """The state before a step, besides gradients and the optimizer: counters, buffers, attributes, the batch.

    Only tensors that trials or earlier steps were seen to change are cloned: a teacher that is updated within the
    step costs its bytes once more. One that the failed step was the first to change is restored if it has a spare
    copy; else `restore` returns its name.
    """

    def __init__(self, step: Step, changing: frozenset[tuple[str, str]] | None, spares: SpareCopies) -> None:
        self._undo = [
            step.keep_counters(),
            step.run.keep_results(),
            step.run.keep_scaler(),
        ]
        kept = {**step.run.changed_beside(), **_step_hooks(step)}
        optimizers = step.run.steppers(step)
        self.rollback = Rollback(
            step.run.module, changing, batches=[step.batch], beside=kept, optimizers=optimizers, spares=spares
        )
        self._gradients = KeptGradients(step, self.rollback.leaves()) if step.starts_window else None

    def optimizer_steps(self) -> frozenset[tuple[str, str]]:
        """The optimizer changes weights from here on; returns the tensors that the step itself has changed."""
        return self.rollback.optimizer_steps()

    def restore_gradients(self) -> None:
        """Restore the gradients before the window; those of its own batches are gone."""
        if self._gradients is not None:
            self._gradients.restore()

    def restore(self) -> frozenset[tuple[str, str]]:
        """Restore the state, any number of times; returns the tensors that were changed in place and not cloned."""
        for put_back in self._undo:
            put_back()
        return self.rollback.restore()


@dataclass(frozen=True, kw_only=True)
class _Past:
    """A batch of the accumulation window that has run, and what it takes to run it again."""

    step: Step
    point: SafePoint
    form: Form  # see `Partition.form`


class Recovery:
    """Drives optimizer steps; retries a step after an OOM with smaller micro-batches.

    Weights and optimizer states change in the optimizer's own step only, and that step finishes what it has begun
    (`optim.journal`): wherever memory runs out, they are as before the step or as after it.

    Args:
        runner: runs the step's batch in micro-batches, whose size is what shrinks and grows.
        resized: called whenever the size has changed.
        dry: makes the error for a batch that no smaller micro-batch can help; None if it has found another way.
        reconsider: called before a batch runs again because its loss was not the one that was proven.

    Attributes:
        retries: whether an OOM is retried. A batch whose loss was not as proven runs again in any case.
        changing: the tensors that steps were seen to change; None where that is unknown.
        spares: copies of small tensors that steps have not changed so far.
        failed_sizes: the sizes of micro-batches, or of chunks of rows, that ran out of memory.
        failed_tokens: the sizes of chunks of tokens that did.
    """

    def __init__(
        self,
        runner: PartsRunner,
        *,
        resized: Resized,
        dry: Callable[[Step, str], Exception | None],
        reconsider: Reconsidered,
    ) -> None:
        self.retries = True
        self._reconsider = reconsider
        self.changing: frozenset[tuple[str, str]] | None = None
        self.spares = SpareCopies(0)
        self._runner = runner
        self._resized = resized
        self._dry = dry
        self._past: list[_Past] = []
        self._point: SafePoint | None = None
        self.failed_sizes, self.failed_tokens = FailedSizes(), FailedSizes()
        self._stepping = False
        self._repeated = False  # the step at hand ran out of memory in its smallest micro-batches

    def close(self) -> None:
        """Let go of the state before the last step, which would keep weights on the device after the run."""
        self._past, self._point, self.spares = [], None, SpareCopies(0)
        self._runner.watch.forget()

    def optimizer_steps(self) -> None:
        """The optimizer's own step begins if all ranks agree. Weights change from here on."""
        self._runner.ranks.optimizer_steps()
        self._stepping = True
        if self._point is not None and self.changing is not None:
            self.changing |= self._point.optimizer_steps()

    def drive(self, step: Step, optimize: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Take the step; retry it as often as needed.

        Args:
            step: the batch, and what the loop does with it.
            optimize: forward and backward in micro-batches, hooks, clipping and the optimizer's step.

        Returns:
            What `optimize` returned.

        Raises:
            OutOfMemoryError: micro-batches of one sample run out of memory, or the batch can't be split.
        """
        ends_window, ranks, point, retries = step.ends_window, self._runner.ranks, None, 0
        self._repeated = False
        if step.starts_window:
            self._past = []
            self._grow(step)
        foreseen_wrongly: ForeseenWronglyError | None = None
        while True:
            self._stepping, self._runner.phase = False, "before forward"
            try:
                ranks.begin_step(starts_window=step.starts_window)
                if point is None:
                    point = self._point = SafePoint(step, self.changing, self.spares)
                    self._runner.watch.start(point.rollback)
                if retries and self._past:
                    self._replay()
                    point.restore()
                result = optimize()
                ranks.optimizer_steps()
                break
            except ForeseenWronglyError as error:
                # Without its frames, which hold the failed step's tensors.
                foreseen_wrongly, failure = error.with_traceback(None), ""
                foreseen_wrongly.__context__ = None
            except (RuntimeError, MemoryError) as error:
                if not self._retriable(step.run, error):
                    raise
                step.run.out_of_memory(error)
                foreseen_wrongly, failure = None, f"{type(error).__name__}: {error}"
            # Outside of `except`: the traceback holds the failed step's tensors alive.
            retries += 1
            if foreseen_wrongly is not None:
                self._put_back(step, point)
                self._reconsider(step, foreseen_wrongly, last=retries > _MOST_REPEATS)
                continue
            ranks.failed()
            self._begin_again(step, failure, point)
        for failed in (self.failed_sizes, self.failed_tokens):
            failed.ended(calm=not retries)
        if ends_window:
            self._past = []
        else:
            self._past.append(_Past(step=step, point=point, form=self._runner.partition.form))
        return result

    def _replay(self) -> None:
        """Run the window's earlier batches again, split as before: their gradients are bitwise the same."""
        for past in self._past:
            past.point.restore()
            with self._runner.partition.formed(past.form):
                self._runner.run_again(past.step)

    def _retriable(self, run: Run, error: BaseException) -> bool:
        if not self.retries or not is_out_of_memory(error) or self._runner.ranks.reason:
            return False
        if not self._stepping:
            return True
        # Once the optimizer steps, other ranks may have stepped: a rank alone must not go back.
        alone = run.world_size == 1
        return alone and isinstance(error, StepOutOfMemoryError) and not error.half_stepped

    def _put_back(self, step: Step, point: SafePoint | None) -> None:
        """Restore the state before the step, with those gradients only that were there before its window."""
        for parameter in step.run.module.parameters():
            parameter.grad = None
        first = self._past[0].point if self._past else point
        if first is not None:
            first.restore_gradients()
        lost = point.restore() if point is not None else frozenset()
        if lost:
            names = ", ".join(sorted(label(*key) for key in lost))
            if self.changing is not None:
                self.changing |= lost
            warnings.warn(
                f"The step that is retried had changed {names} in place for the first time; these "
                "keep the failed step's values, and the retry is not exact in them.",
                stacklevel=2,
            )

    def _begin_again(self, step: Step, failure: str, point: SafePoint | None) -> None:
        """Restore the state before the step, and halve the micro-batches, or the chunks of modules."""
        self._put_back(step, point)
        free_memory()
        partition = self._runner.partition
        was = f", {self._runner.chunks}" if partition.in_chunks else ""
        rows, failed = partition.micro_batch_size, self._shrink(step, failure)
        of, into = (
            f"a micro-batch of {rows if was else failed}",
            f"in micro-batches of {partition.micro_batch_size}",
        )
        if partition.keeps_whole or partition.unsplittable:
            of, into = "the whole batch", "whole"
        if partition.in_chunks:
            self._runner.chunks.resize(partition.chunk_rows, partition.chunk_tokens)
            into += f", {self._runner.chunks}"
        of += was
        step.run.info(
            f"MemoryBudget: out of memory at batch {step.batch_idx} {self._runner.phase} with {of}; the state before "
            f"the step is restored, and the batch is retried {into} ({failure})"
        )

    def _shrink(self, step: Step, failure: str) -> int:
        """Halve the size; returns the one that failed."""
        partition = self._runner.partition
        size = 1 if partition.keeps_whole and not partition.in_chunks else partition.finest
        if partition.chunk_tokens is None and not partition.keeps_whole:
            size = min(size, batch_size(step.batch))
        failed = self._runner.ranks.largest(size)
        if failed == 1 and partition.row_tokens is not None:
            partition.form_by_rows()  # a micro-batch by tokens may hold several short rows
        elif failed == 1 or partition.misfit or (partition.unsplittable and not partition.in_chunks):
            error = self._dry(step, failure) if self._repeated else None
            if error is not None:
                raise error
            # This size was measured to fit: a fragmented cache or another process may be the cause.
            self._repeated = True
        else:
            self._failed.add(failed)
            partition.resize_finest((failed + 1) // 2)
        self._resized(step, retry=True)
        return failed

    def _grow(self, step: Step) -> None:
        """After enough steps without an OOM, try the size that last ran out of memory once more."""
        partition = self._runner.partition
        size = self._failed.due(partition.finest)
        if size is None:
            return
        what = "chunks" if partition.in_chunks else "micro-batches"
        step.run.info(
            f"MemoryBudget: {self._failed.patience} steps without an OOM; {what} of {size} are tried again."
        )
        partition.resize_finest(size)
        self._resized(step, retry=False)

    @property
    def _failed(self) -> FailedSizes:
        """The failed sizes of what is resized now."""
        return self.failed_sizes if self._runner.partition.chunk_tokens is None else self.failed_tokens


def _step_hooks(step: Step) -> dict[str, Any]:
    """The hooks before an optimizer's step, which a retry calls again; hooks after it run after the last retry."""
    hooks: Any = getattr(step.optimizer, "_optimizer_step_pre_hooks", {})  # torch's; others may have none
    return {"step_pre_hooks": list(hooks.values())} if hooks else {}

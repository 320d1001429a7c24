"""Retry a step that ran out of memory: the state before it, smaller parts, the same batch again."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_memkit.memory.out_of_memory import free_unused, is_out_of_memory
from lightning_memkit.micro_batching import batch_size
from lightning_memkit.micro_batching.foreseen import ForeseenWronglyError
from lightning_memkit.micro_batching.rollback import Rollback
from lightning_memkit.micro_batching.step_changes import label
from lightning_memkit.optim.journaled_step import StepOutOfMemoryError
from lightning_memkit.plugins import _seam
from lightning_memkit.plugins._parts import PartsRunner
from lightning_memkit.plugins._trials import beside

_CALM_STEPS = 32  # without an OOM, before larger parts are tried again; twice as many after each failure
_MOST_REPEATS = 3  # of a batch that was foreseen wrongly: its totals, its terms, or both


class Resized(Protocol):
    """What is told of another size of the parts."""

    def __call__(self, step: _seam.Step, *, retry: bool) -> None: ...


class Reconsidered(Protocol):
    """What is told of a batch that was foreseen wrongly."""

    def __call__(self, step: _seam.Step, error: ForeseenWronglyError, *, last: bool) -> None: ...


class SafePoint:
    """What a step changes besides gradients and the optimizer, as it was before the step; the batch included.

    Of tensors those are cloned that trials, or earlier steps, were seen to change: a teacher that is moved within the
    step costs its bytes once more. One that a step changes for the first time as it runs out of memory is named.
    """

    def __init__(self, step: _seam.Step, changing: frozenset[tuple[str, str]] | None) -> None:
        self._undo = [
            step.keep_counters(),
            _seam.keep_results(step.trainer),
            _seam.keep_scaler(step.trainer),
        ]
        kept = {**beside(step), **_step_hooks(step)}
        self._rollback = Rollback(step.trainer.lightning_module, changing, batches=[step.batch], beside=kept)

    def optimizer_steps(self) -> frozenset[tuple[str, str]]:
        """Weights change by the optimizer from here on; returns the tensors that the step itself has changed."""
        return self._rollback.optimizer_steps()

    def restore(self) -> frozenset[tuple[str, str]]:
        """Put it back, as often as needed; returns the tensors that were changed in place and not cloned."""
        for put_back in self._undo:
            put_back()
        return self._rollback.restore()


@dataclass(frozen=True, kw_only=True)
class _Past:
    """A batch of the accumulation window that has run: how to run it again."""

    step: _seam.Step
    point: SafePoint
    micro_batch_size: int
    row_tokens: int | None


class Recovery:
    """Drives optimizer steps; after an OOM, the same step again with smaller parts.

    Weights and the optimizer change in the optimizer's own step only, and that step repairs itself
    (`optim.journal`): wherever memory runs out, they are as before the step or as after it.

    Args:
        runner: runs the step's batch in parts; its partition's size is what shrinks and grows.
        resized: called with the step whenever the size has changed, and whether a retry is the cause.
        dry: the error for a batch that no smaller part can help.
        reconsider: told of a batch whose loss was another one than foreseen, before it runs again; and when it has
            been foreseen wrongly so often that it is not to be split any more.

    Attributes:
        retries: an OOM is retried; else only a batch that was foreseen wrongly runs again.
    """

    def __init__(
        self,
        runner: PartsRunner,
        *,
        resized: Resized,
        dry: Callable[[_seam.Step, str], Exception],
        reconsider: Reconsidered,
    ) -> None:
        self.retries = True
        self._reconsider = reconsider
        self.changing: frozenset[tuple[str, str]] | None = None
        self._runner = runner
        self._resized = resized
        self._dry = dry
        self._past: list[_Past] = []
        self._point: SafePoint | None = None
        self._larger: list[int] = []  # sizes that ran out of memory, the smallest last
        self._calm, self._patience = 0, _CALM_STEPS
        self._stepping = False
        self._repeated = False  # the step at hand ran out of memory in its smallest parts
        self._grown = False  # larger parts are on trial

    def state_dict(self) -> dict[str, Any]:
        """What decides when larger parts are tried again."""
        return {"larger": list(self._larger), "calm": self._calm, "patience": self._patience}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the run that wrote it would have."""
        self._larger = [int(size) for size in state.get("larger", ())]
        self._calm = int(state.get("calm", 0))
        self._patience = int(state.get("patience", _CALM_STEPS))

    def forget_above(self, size: int) -> None:
        """Larger sizes are not tried again: this one is faster."""
        self._larger = [larger for larger in self._larger if larger <= size]

    def optimizer_steps(self) -> None:
        """The optimizer's own step begins, if all ranks agree; from here on weights change."""
        self._runner.ranks.optimizer_steps()
        self._stepping = True
        if self._point is not None and self.changing is not None:
            self.changing |= self._point.optimizer_steps()

    def drive(self, step: _seam.Step, optimize: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Take the step, as often as it takes.

        Args:
            step: the batch, and the seams of the loop.
            optimize: forward and backward in parts, hooks, clipping and the optimizer's step.

        Raises:
            OutOfMemoryError: parts of one sample run out of memory, or the batch can't be split.
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
                    point = self._point = SafePoint(step, self.changing)
                if retries and self._past:
                    self._replay()
                    point.restore()
                result = optimize()
                ranks.optimizer_steps()
                break
            except ForeseenWronglyError as error:
                foreseen_wrongly, failure = error, ""
            except (RuntimeError, MemoryError) as error:
                if not self._retriable(step.trainer, error):
                    raise
                _tell(step.trainer, error)
                foreseen_wrongly, failure = None, f"{type(error).__name__}: {error}"
            # Outside of `except`: the traceback holds the failed step's tensors alive.
            retries += 1
            if foreseen_wrongly is not None:
                self._put_back(step, point)
                self._reconsider(step, foreseen_wrongly, last=retries > _MOST_REPEATS)
                continue
            ranks.failed()
            self._begin_again(step, failure, point)
        self._calm = 0 if retries else self._calm + 1
        if ends_window:
            self._past = []
        else:
            size, row_tokens = self._runner.partition.micro_batch_size, self._runner.partition.row_tokens
            self._past.append(_Past(step=step, point=point, micro_batch_size=size, row_tokens=row_tokens))
        return result

    def _replay(self) -> None:
        """Run the window's earlier batches again, each as it ran before: gradients are bit for bit what they were."""
        partition = self._runner.partition
        now = partition.micro_batch_size, partition.row_tokens
        for past in self._past:
            past.point.restore()
            partition.micro_batch_size, partition.row_tokens = past.micro_batch_size, past.row_tokens
            try:
                self._runner.run_again(past.step)
            finally:
                partition.micro_batch_size, partition.row_tokens = now

    def _retriable(self, trainer: Trainer, error: BaseException) -> bool:
        if not self.retries or not is_out_of_memory(error) or self._runner.ranks.reason:
            return False
        if not self._stepping:
            return True
        # Other ranks have stepped.
        alone = trainer.world_size == 1
        return alone and isinstance(error, StepOutOfMemoryError) and not error.half_stepped

    def _put_back(self, step: _seam.Step, point: SafePoint | None) -> None:
        """Restore the state before the step, without gradients."""
        for parameter in step.trainer.lightning_module.parameters():
            parameter.grad = None
        lost = point.restore() if point is not None else frozenset()
        if lost:
            names = ", ".join(sorted(label(*key) for key in lost))
            if self.changing is not None:
                self.changing |= lost
            warnings.warn(
                f"The step that is repeated had changed {names} in place for the first time; these "
                "keep the failed step's values, and the retry is not exact in them.",
                stacklevel=2,
            )

    def _begin_again(self, step: _seam.Step, failure: str, point: SafePoint | None) -> None:
        """Restore the state before the step, and halve the parts."""
        self._put_back(step, point)
        free_unused()
        failed = self._shrink(step, failure)
        rank_zero_info(
            f"MemoryBudget: out of memory at batch {step.batch_idx} {self._runner.phase} "
            f"with a micro-batch of {failed}; "
            f"the state before the step is restored, and the batch runs again in parts of "
            f"{self._runner.partition.micro_batch_size} ({failure})"
        )

    def _shrink(self, step: _seam.Step, failure: str) -> int:
        partition = self._runner.partition
        failed = 1 if partition.whole else min(partition.micro_batch_size, batch_size(step.batch))
        failed = self._runner.ranks.largest(failed)
        if failed == 1 and partition.row_tokens is not None:
            partition.row_tokens = None  # a part may hold several short rows
            self._resized(step, retry=True)
            return failed
        if failed == 1 or self._runner.unsplittable:
            if self._repeated:
                raise self._dry(step, failure)
            self._repeated = True  # it was measured to fit: another process or a fragmented cache may be why
            self._resized(step, retry=True)
            return failed
        self._patience = 2 * self._patience if self._grown else _CALM_STEPS
        self._grown = False
        if not self._larger or self._larger[-1] > failed:
            self._larger.append(failed)
        partition.micro_batch_size = (failed + 1) // 2
        self._resized(step, retry=True)
        return failed

    def _grow(self, step: _seam.Step) -> None:
        """After calm steps, try the size that last ran out of memory once more."""
        if not self._larger or self._calm < self._patience:
            return
        self._calm, self._grown = 0, False
        size = self._larger[-1]
        partition = self._runner.partition
        if size > partition.micro_batch_size:
            self._grown = True
            rank_zero_info(
                f"MemoryBudget: {self._patience} steps without an OOM; parts of {size} are tried again."
            )
            partition.micro_batch_size = size
            self._resized(step, retry=False)
        else:
            self._larger.pop()


def _step_hooks(step: _seam.Step) -> dict[str, Any]:
    """The hooks that an optimizer's step begins with, which a retry calls again; those after it are past retries."""
    hooks: Any = getattr(step.optimizer, "_optimizer_step_pre_hooks", {})  # torch's; others may have none
    return {"step_pre_hooks": list(hooks.values())} if hooks else {}


def _tell(trainer: Trainer, error: BaseException) -> None:
    """Let callbacks look at what lives, which the error's traceback holds."""
    for callback in vars(trainer)["callbacks"]:
        seen = getattr(callback, "on_out_of_memory", None)
        if seen is not None:
            seen(trainer, error)

"""Coordination of ranks under DDP, ZeRO-1 and FSDP2; `ranks/agreement.py` lists the calls of a step."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_memkit.distributed.agreement import Agreement, Meeting, StepOutcome
from lightning_memkit.distributed.announced import together
from lightning_memkit.distributed.catch_up import CannotCatchUpError, CatchUp
from lightning_memkit.distributed.clipping import can_clip, clip_sharded_gradients
from lightning_memkit.distributed.collectives import collectives_issued
from lightning_memkit.distributed.ddp import LateReduction, broadcast_buffers, local_gradients
from lightning_memkit.memory.out_of_memory import free_memory, is_out_of_memory
from lightning_memkit.micro_batching.ranks.alone import Ranks
from lightning_memkit.micro_batching.shares.foreseen import ForeseenElsewhereError, ForeseenWronglyError

T = TypeVar("T")
_A_PART = "the ranks gathered weights and reduced gradients"


class Agreeing(Ranks):
    """Ranks that tell each other the outcome of a step."""

    def __init__(self, counts: int) -> None:
        self._agreement = Agreement(max(counts, 8))
        self._listening = False  # whether the other ranks learn of a failure only at the next agreement
        self._issued: int | None = 0
        self._issued_before_steps = 0  # collectives of hooks and clipping in the last successful step

    @override
    def begin_step(self, *, starts_window: bool) -> None:
        self._listening, self._issued = True, None

    @override
    def totals(self, run: Callable[[], Sequence[float]]) -> list[float]:
        failure, numbers = "", []
        try:
            numbers = list(run())
        except Exception as error:
            if not is_out_of_memory(error):
                self._agreement.end()
                raise
            failure = _text(error)
        self._listening = False
        meeting = self._agreement.meet(StepOutcome.OUT_OF_MEMORY if failure else StepOutcome.DONE, numbers)
        self._raise_together(meeting, failure)
        return list(meeting.counts)

    @override
    def largest(self, size: int) -> int:
        return int(self._agreement.largest([size])[0])

    @override
    def attempt(self, run: Callable[[], T], *, ends_window: bool) -> T:
        self._listening = False
        result = self._attempted(run, ends_window=ends_window)
        self._listening, self._issued = ends_window, self._collectives()
        return result

    def _attempted(self, run: Callable[[], T], *, ends_window: bool) -> T:
        return run()

    @override
    def completed(self, run: Callable[[], None]) -> None:
        try:
            together(self._agreement, run, passed_on=(ForeseenWronglyError,))
        except torch.OutOfMemoryError:
            self._listening = False  # all ranks know
            raise
        self._issued = self._collectives()

    @override
    def optimizer_steps(self) -> None:
        if self._listening:
            self._issued_before_steps = self._issued_since()
            self._meet(StepOutcome.DONE)
            self._listening = False

    @override
    def failed(self) -> None:
        if not self._listening:
            return
        self._listening = False
        if self._issued is not None and self._issued_since() < self._issued_before_steps:
            raise CannotCatchUpError(
                "Memory ran out in a hook before the optimizer's step that communicates; the other ranks wait in it."
            )
        self._agreement.meet(StepOutcome.OUT_OF_MEMORY)

    @override
    def close(self) -> None:
        self._agreement.close()

    def _collectives(self) -> int | None:
        return collectives_issued(self._agreement.group)

    def _issued_since(self) -> int:
        now = self._collectives()
        return 0 if now is None or self._issued is None else now - self._issued

    def _meet(self, outcome: StepOutcome, failure: str = "") -> None:
        self._raise_together(self._agreement.meet(outcome), failure)

    def _raise_together(self, meeting: Meeting, failure: str, unforeseen: Exception | None = None) -> None:
        """Raise on every rank the error that happened on one."""
        if meeting.any_failed:
            self._listening = False
        if meeting.failed:
            others = ", ".join(str(rank) for rank in meeting.failed)
            raise torch.OutOfMemoryError(
                failure or f"Rank {others} ran out of memory; all ranks retry the step."
            )
        if meeting.unforeseen:
            others = ", ".join(str(rank) for rank in meeting.unforeseen)
            raise unforeseen or ForeseenElsewhereError(f"on rank {others}")


class Announced(Agreeing):
    """Ranks whose evaluation steps hold the user's own collectives: the ranks agree before each of these."""

    meets = exchanges = True

    def __init__(self) -> None:
        super().__init__(counts=0)

    @override
    def largest_of(self, values: Sequence[float]) -> list[float]:
        return self._agreement.largest(values)

    @override
    def part(self, run: Callable[[], T], **options: Any) -> T:
        return together(self._agreement, run)


class DataParallel(Agreeing):
    """DDP, and ZeRO-1 on top of it: gradients are averaged after all ranks have finished their backwards."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._reduction = LateReduction(ddp)
        self._meets_in_parts = False
        super().__init__(counts=len(self._reduction.parameters))

    @property
    @override
    def exchanges(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._meets_in_parts

    @override
    def begin_step(self, *, starts_window: bool) -> None:
        if starts_window:
            broadcast_buffers(self._ddp)
        super().begin_step(starts_window=starts_window)

    @override
    def part(self, run: Callable[[], T], **options: Any) -> T:
        with local_gradients(self._ddp):
            return run()

    @override
    def alike(self, run: Callable[[], T]) -> T:
        failure, unforeseen, results = self._tried(run)
        self._raise_together(self._agreement.meet(_outcome(failure, results)), failure, unforeseen)
        return results[0]

    def _attempted(self, run: Callable[[], T], *, ends_window: bool) -> T:
        failure, unforeseen, results = self._tried(run)
        outcome = _outcome(failure, results)
        if not ends_window:
            self._raise_together(self._agreement.meet(outcome), failure, unforeseen)
            return results[0]
        self._raise_together(self._reduction.agree(self._agreement, outcome), failure, unforeseen)
        self._reduction.reduce()
        return results[0]

    def _tried(self, run: Callable[[], T]) -> tuple[str, ForeseenWronglyError | None, list[T]]:
        """Why memory ran out, empty if it did not; what was predicted wrongly, if anything; and the result, if any."""
        failure, unforeseen, results, before = "", None, list[T](), self._collectives()
        try:
            results.append(run())
        except ForeseenWronglyError as error:
            unforeseen = error.with_traceback(None)
        except Exception as error:
            if not is_out_of_memory(error):
                self._agreement.end()
                raise
            failure = _text(error)
        # Outside of `except`: its traceback keeps the failed micro-batch's tensors alive.
        if not results and self._meets_in_parts:
            raise CannotCatchUpError(
                f"The step communicates in its forward, where other ranks wait. {failure or unforeseen}"
            )
        if results and before != self._collectives():
            self._meets_in_parts = True
        return failure, unforeseen, results


class Sharded(Agreeing):
    """FSDP2: ranks communicate in every layer, and agree after every micro-batch."""

    uncounted = "backward"
    meets = True

    def __init__(self, model: nn.Module) -> None:
        self._catch_up = CatchUp(model)
        super().__init__(counts=0)

    @property
    @override
    def exchanges(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._catch_up.foreign

    @override
    def begin_step(self, *, starts_window: bool) -> None:
        self._catch_up.begin()
        super().begin_step(starts_window=starts_window)

    @override
    def most_parts(self, parts: int) -> int:
        return self.largest(parts)

    @override
    def largest_of(self, values: Sequence[float]) -> list[float]:
        return self._agreement.largest(values)

    @override
    def forget_part(self) -> None:
        self._catch_up.reset()

    @override
    def part(
        self,
        run: Callable[[], T],
        *,
        counts: bool = True,
        smallest: Callable[[], object] | None = None,
        kind: str = "train",
        **options: Any,
    ) -> T:
        failure, unforeseen, results = "", None, []
        try:
            with self._catch_up.part(counts=counts, kind=kind), self._agreement.working(_A_PART):
                results.append(run())
        except ForeseenWronglyError as error:
            unforeseen = error.with_traceback(None)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failure = _text(error)
        if not results:
            free_memory()
            with self._agreement.working(_A_PART):
                self._catch_up.finish(smallest)
        meeting = self._agreement.meet(_outcome(failure, results))
        if meeting.any_failed:
            self._catch_up.reset()
        self._raise_together(meeting, failure, unforeseen)
        return results[0]

    @override
    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> bool:
        parameters = list(parameters)
        if not can_clip(parameters):
            return False

        def any_failed(failed: bool) -> bool:
            return self._agreement.meet(StepOutcome.OUT_OF_MEMORY if failed else StepOutcome.DONE).any_failed

        try:
            clip_sharded_gradients(parameters, max_norm, any_failed)
        except torch.OutOfMemoryError:
            self._listening = False  # `any_failed` has told the other ranks
            raise
        if self._issued is not None:
            # Not to be counted as a hook's collective: the agreement before it lets no rank wait in it.
            self._issued += 1
        return True

    @override
    def close(self) -> None:
        self._catch_up.close()
        super().close()


def _outcome(failure: str, results: Sequence[object]) -> StepOutcome:
    return StepOutcome.OUT_OF_MEMORY if failure else StepOutcome.DONE if results else StepOutcome.UNFORESEEN


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, torch.OutOfMemoryError) else f"{type(error).__name__}: {error}"

"""What ranks do together in a step, so that a rank that runs out of memory leaves no other waiting.

One `Ranks` is made where the model is wrapped, before any trial, by all ranks (`ranks_of`). A rank's out-of-memory
error becomes an `OutOfMemoryError` on all ranks at the same point: each then restores its own state and takes the
step again, in parts that are smaller by the same rule. Who calls what, in a step:

1. `begin_step`, before the state before the step is taken: DDP's buffers are broadcast here.
2. `totals(run)` around splitting and weighing a batch: what all ranks hold together.
3. `attempt(run)` around all parts of a batch, also where a window's earlier batch is run again. DDP: the ranks agree
   after the last part, then gradients are averaged (at a window's end).
4. `part(run)` around each part: its transfer, forward and backward, and those of trials. DDP: nothing is reduced in
   it. FSDP2: a rank that fails catches up, then all agree. All ranks run `most_parts` parts; those that repeat one do
   not count, and what they add to gradients is zero, whatever their loss.
5. `clip` where gradients are clipped by norm: sharded ones need an agreement before their all-reduce.
6. `optimizer_steps`, when the optimizer's own step begins, and once more when the whole step is over: the second
   agreement, over hooks and clipping.
7. `failed`, outside of any `except`, where a rank has caught an out-of-memory error of the step: its peers hear of it
   where they still listen. Then restore, halve the `largest` of all ranks' sizes, and begin again. After
   `optimizer_steps` nothing can be retried: raise.
"""

import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, cast

import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_memkit.distributed.agreement import Agreement, Meeting, Outcome
from lightning_memkit.distributed.catch_up import CannotCatchUpError, CatchUp, why_no_catch_up
from lightning_memkit.distributed.clipping import can_clip, clip_sharded_gradients
from lightning_memkit.distributed.collectives import collectives_issued
from lightning_memkit.distributed.ddp import (
    LateReduction,
    broadcast_buffers,
    local_gradients,
    why_no_late_reduction,
)
from lightning_memkit.distributed.fsdp2 import sharded_states
from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.plugins import _seam

T = TypeVar("T")


def largest_of_ranks(trainer: Trainer, values: Sequence[float]) -> list[float]:
    """Each value's maximum over all ranks, exact for integers below 2**53."""
    if trainer.world_size == 1:
        return list(values)
    largest = torch.tensor(values, dtype=torch.float64, device=trainer.strategy.root_device)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return largest.tolist()


def any_rank(trainer: Trainer, truth: bool) -> bool:
    """Whether it holds on at least one rank."""
    return largest_of_ranks(trainer, [float(truth)])[0] > 0


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer that steps this rank's share of the weights: the one within ZeRO-1's, else the given one."""
    # Whoever has such an optimizer has imported it; importing it here would warn.
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    zero: Any = getattr(module, "ZeroRedundancyOptimizer", ())
    return cast(Any, optimizer).optim if isinstance(optimizer, zero) else optimizer


def ranks_of(trainer: Trainer, *, recover: bool = True) -> "Ranks":
    """What ranks do together under the trainer's strategy; all ranks call it at the same point.

    Args:
        trainer: its strategy has wrapped the model.
        recover: whether steps are to be retried. Otherwise the strategy's own reduction is left as it is.
    """
    model = trainer.strategy.model
    if trainer.world_size == 1:
        return Ranks()
    if not recover or model is None:
        return _Unretried(trainer, "recover=False")
    if isinstance(model, DistributedDataParallel):
        reason = why_no_late_reduction(model)
        return _Unretried(trainer, reason) if reason else _DataParallel(model)
    if not sharded_states(model):
        return _Unretried(trainer, f"{type(trainer.strategy).__name__} is neither DDP nor FSDP2")
    reason = why_no_catch_up(model)
    return _Unretried(trainer, reason) if reason else _Sharded(model)


class Ranks:
    """A rank that is alone: everything runs as it is.

    Attributes:
        reason: why steps are not retried; empty where they are.
        uncounted: what other ranks need of a part in which nothing counts: no backward; one that leaves zeros in all
            gradients; or its own, since it communicates (of its loss times zero).
    """

    reason = ""
    uncounted: Literal["skip", "zeros", "backward"] = "skip"

    def begin_step(self, *, starts_window: bool) -> None:
        """Before the state before a step is taken."""

    def totals(self, run: Callable[[], Sequence[float]]) -> list[float]:
        """Run what gives numbers of this rank, and add them up over all ranks; at most eight.

        Raises:
            OutOfMemoryError: on all ranks, where one failed.
        """
        return list(run())

    def most_parts(self, parts: int) -> int:
        """How many parts each rank has to run: where ranks meet in every part, the largest number of any rank."""
        return parts

    def largest(self, size: int) -> int:
        """The largest of all ranks' sizes: what failed is halved to the same on all, also where rows are fewer."""
        return size

    def part(
        self,
        run: Callable[[], T],
        *,
        counts: bool = True,
        last: bool = False,
        smallest: Callable[[], object] | None = None,
        kind: str = "train",
    ) -> T:
        """Run one part: its transfer, forward and backward.

        Args:
            run: does it, and keeps nothing of it alive where it fails.
            counts: what it adds to sharded gradients is kept; otherwise it is exactly zero, also for a loss of nan.
            last: it ends a window: where DDP reduces by itself, it does so in this part's backward.
            smallest: forward and backward of one row, for sharded ranks of which one fails in the first part ever.
            kind: tells parts of other passes (validation) apart, which communicate otherwise.

        Raises:
            OutOfMemoryError: sharded: on all ranks, where one failed; else where this one did.
            CannotCatchUpError: this rank has to end, and its peers with it.
        """
        return run()

    def attempt(self, run: Callable[[], T], *, ends_window: bool) -> T:
        """Run all parts of a batch; at a window's end gradients are all ranks' afterwards.

        Raises:
            OutOfMemoryError: on all ranks, where one failed.
        """
        return run()

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> bool:
        """Clip gradients by their norm, bitwise as torch does, if it takes ranks to do so; whether it was done.

        Raises:
            OutOfMemoryError: on all ranks, where one failed.
        """
        return False

    def optimizer_steps(self) -> None:
        """Agree that all ranks step.

        Raises:
            OutOfMemoryError: on all ranks, where one failed since the backward.
        """

    def failed(self) -> None:
        """Tell the peers, where they don't know yet, that this rank ran out of memory.

        Raises:
            CannotCatchUpError: the peers wait where this rank can't join them.
        """

    def close(self) -> None:
        """Give groups and the engine's own collectives back."""


class _Unretried(Ranks):
    """Ranks that can't or needn't agree: the strategy reduces gradients by itself."""

    def __init__(self, trainer: Trainer, reason: str) -> None:
        self.reason = reason
        self._trainer = trainer
        self._meets_in_parts = _seam.communicates_in_every_part(trainer)
        self.uncounted = "backward" if self._meets_in_parts else "zeros"

    def totals(self, run: Callable[[], Sequence[float]]) -> list[float]:
        device = self._trainer.strategy.root_device
        numbers = torch.tensor(list(run()), dtype=torch.float64, device=device)
        torch.distributed.all_reduce(numbers)
        return numbers.tolist()

    def most_parts(self, parts: int) -> int:
        return self.largest(parts) if self._meets_in_parts else parts

    def largest(self, size: int) -> int:
        return int(largest_of_ranks(self._trainer, [size])[0])

    def part(self, run: Callable[[], T], *, last: bool = False, **options: Any) -> T:
        with _seam.no_gradient_sync(self._trainer, block=not last):
            return run()


class _Agreeing(Ranks):
    """Ranks that tell each other how a step goes."""

    def __init__(self, counts: int) -> None:
        self._agreement = Agreement(max(counts, 8))
        self._listening = False  # the peers will hear of a failure where they meet next
        self._issued: int | None = 0
        self._issued_before_steps = 0  # collectives of hooks and clipping, in the last step that went well

    def begin_step(self, *, starts_window: bool) -> None:
        self._listening, self._issued = True, None

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
        meeting = self._agreement.meet(Outcome.OUT_OF_MEMORY if failure else Outcome.DONE, numbers)
        self._raise_together(meeting, failure)
        return list(meeting.counts)

    def largest(self, size: int) -> int:
        return int(self._agreement.largest([size])[0])

    def attempt(self, run: Callable[[], T], *, ends_window: bool) -> T:
        self._listening = False
        result = self._attempted(run, ends_window=ends_window)
        self._listening, self._issued = ends_window, self._collectives()
        return result

    def _attempted(self, run: Callable[[], T], *, ends_window: bool) -> T:
        return run()

    def optimizer_steps(self) -> None:
        if self._listening:
            self._issued_before_steps = self._issued_since()
            self._meet(Outcome.DONE)
            self._listening = False

    def failed(self) -> None:
        if not self._listening:
            return
        self._listening = False
        if self._issued is not None and self._issued_since() < self._issued_before_steps:
            raise CannotCatchUpError(
                "Memory ran out in a hook before the optimizer's step that communicates; the other ranks wait in it."
            )
        self._agreement.meet(Outcome.OUT_OF_MEMORY)

    def close(self) -> None:
        self._agreement.close()

    def _collectives(self) -> int | None:
        return collectives_issued(self._agreement.group)

    def _issued_since(self) -> int:
        now = self._collectives()
        return 0 if now is None or self._issued is None else now - self._issued

    def _meet(self, outcome: Outcome, failure: str = "") -> None:
        self._raise_together(self._agreement.meet(outcome), failure)

    def _raise_together(self, meeting: Meeting, failure: str) -> None:
        """Raise on every rank what happened on one."""
        if meeting.any_failed:
            self._listening = False
            others = ", ".join(str(rank) for rank in meeting.failed)
            raise torch.OutOfMemoryError(
                failure or f"Rank {others} ran out of memory; all ranks repeat the step."
            )


class _DataParallel(_Agreeing):
    """DDP, and ZeRO-1 over it: gradients are averaged once all ranks have them."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._reduction = LateReduction(ddp)
        self._meets_in_parts = False
        super().__init__(counts=len(self._reduction.parameters))

    def begin_step(self, *, starts_window: bool) -> None:
        if starts_window:
            broadcast_buffers(self._ddp)
        super().begin_step(starts_window=starts_window)

    def part(self, run: Callable[[], T], **options: Any) -> T:
        with local_gradients(self._ddp):
            return run()

    def _attempted(self, run: Callable[[], T], *, ends_window: bool) -> T:
        failure, results, before = "", [], self._collectives()
        try:
            results.append(run())
        except Exception as error:
            if not is_out_of_memory(error):
                self._agreement.end()
                raise
            failure = _text(error)
        # Outside of `except`: its traceback holds the failed parts' tensors alive.
        if failure and self._meets_in_parts:
            raise CannotCatchUpError(
                f"The step communicates in its forward, where other ranks wait. {failure}"
            )
        if not failure and before != self._collectives():
            self._meets_in_parts = True
        outcome = Outcome.OUT_OF_MEMORY if failure else Outcome.DONE
        if not ends_window:
            self._meet(outcome, failure)
            return results[0]
        self._raise_together(self._reduction.agree(self._agreement, outcome), failure)
        self._reduction.reduce()
        return results[0]


class _Sharded(_Agreeing):
    """FSDP2: ranks meet in every layer, and agree after every part."""

    uncounted = "backward"

    def __init__(self, model: nn.Module) -> None:
        self._catch_up = CatchUp(model)
        super().__init__(counts=0)

    def begin_step(self, *, starts_window: bool) -> None:
        self._catch_up.begin()
        super().begin_step(starts_window=starts_window)

    def most_parts(self, parts: int) -> int:
        return self.largest(parts)

    def part(
        self,
        run: Callable[[], T],
        *,
        counts: bool = True,
        smallest: Callable[[], object] | None = None,
        kind: str = "train",
        **options: Any,
    ) -> T:
        failure, results = "", []
        try:
            with self._catch_up.part(counts=counts, kind=kind):
                results.append(run())
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failure = _text(error)
        if failure:
            _free_memory()
            self._catch_up.finish(smallest)
        meeting = self._agreement.meet(Outcome.OUT_OF_MEMORY if failure else Outcome.DONE)
        if meeting.any_failed:
            self._catch_up.reset()
        self._raise_together(meeting, failure)
        return results[0]

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> bool:
        parameters = list(parameters)
        if not can_clip(parameters):
            return False

        def any_failed(failed: bool) -> bool:
            return self._agreement.meet(Outcome.OUT_OF_MEMORY if failed else Outcome.DONE).any_failed

        try:
            clip_sharded_gradients(parameters, max_norm, any_failed)
        except torch.OutOfMemoryError:
            self._listening = False  # all know
            raise
        if self._issued is not None:
            self._issued += 1  # agreed on before: nobody is left in it
        return True

    def close(self) -> None:
        self._catch_up.close()
        super().close()


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _free_memory() -> None:
    gc.collect()
    if torch.accelerator.is_available():
        empty = getattr(torch.accelerator, "empty_cache", None) or torch.cuda.empty_cache
        empty()

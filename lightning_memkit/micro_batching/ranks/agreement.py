"""How ranks coordinate a step, so that one that runs out of memory leaves no other waiting in a collective.

All ranks create one `Ranks` (`ranks_of`) after the model is wrapped and before any trial. An out-of-memory
error of one rank becomes an `OutOfMemoryError` on all ranks at the same point. Each then restores its own
state and retries the step with smaller micro-batches, by the same rule. The calls of a step, in order:

1. `begin_step`, before the state before the step is recorded: DDP's buffers are broadcast here.
2. `totals(run)` around splitting and weighing a batch: sums its counts over all ranks.
3. `attempt(run)` around all micro-batches of a batch, also when an earlier batch of a window is run again.
   DDP: the ranks agree after the last micro-batch, then average gradients (at a window's end).
4. `part(run)` around the transfer, forward and backward of each micro-batch, also in trials. DDP: nothing is
   reduced in it. FSDP2: a rank that fails catches up, then all agree. Each rank runs `most_parts`
   micro-batches: a rank with fewer repeats one with weight zero, which adds zeros to gradients, whatever its
   loss.
5. `completed(run)` around what follows the micro-batches: gradients are brought to the batch's scale, and the whole
   batch is compared. The ranks agree before each reduction in it, and at its end.
6. `clip`, where gradients are clipped by norm: sharded ones need an agreement before their all-reduce.
7. `optimizer_steps`, when the optimizer's own step begins, and again after the whole step: the second
   agreement, which covers hooks and clipping.
8. `failed`, outside of any `except`, on a rank that has caught an out-of-memory error of the step: tells the
   other ranks, unless they know. Then restore, halve the `largest` of all ranks' sizes, and retry. After
   `optimizer_steps` nothing can be retried: raise.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_memkit.distributed.catch_up import why_no_catch_up
from lightning_memkit.distributed.ddp import why_no_late_reduction
from lightning_memkit.distributed.fsdp2 import sharded_states
from lightning_memkit.distributed.timeouts import waiting_for_ranks
from lightning_memkit.micro_batching.ranks.alone import Ranks
from lightning_memkit.micro_batching.ranks.together import DataParallel, Sharded
from lightning_memkit.micro_batching.run import Run
from lightning_memkit.optim.methods import local_optimizer

T = TypeVar("T")

__all__ = [
    "Ranks",
    "any_rank",
    "largest_of_ranks",
    "local_optimizer",
    "ranks_of",
    "sum_of_ranks",
    "values_of_ranks",
]


def largest_of_ranks(run: Run, values: Sequence[float]) -> list[float]:
    """Each value's maximum over all ranks, exact for integers below 2**53."""
    if run.world_size == 1:
        return list(values)
    largest = torch.tensor(values, dtype=torch.float64, device=run.device)
    with waiting_for_ranks("the ranks compared numbers"):
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        return largest.tolist()  # within the context, because only this waits for a device's collective


def sum_of_ranks(run: Run, values: Sequence[float]) -> list[float]:
    """Each value's sum over all ranks."""
    if run.world_size == 1:
        return list(values)
    summed = torch.tensor(values, dtype=torch.float64, device=run.device)
    torch.distributed.all_reduce(summed)
    return summed.tolist()


def values_of_ranks(run: Run, value: T) -> list[T]:
    """The values of all ranks, which are pickled for the transfer."""
    if run.world_size == 1:
        return [value]
    values: list[Any] = [None] * run.world_size
    with waiting_for_ranks("the ranks told each other where they stand"):
        torch.distributed.all_gather_object(values, value)
    return values


def any_rank(run: Run, truth: bool) -> bool:
    """Whether it holds on at least one rank."""
    return largest_of_ranks(run, [float(truth)])[0] > 0


def ranks_of(run: Run, *, recover: bool = True) -> Ranks:
    """The `Ranks` for the loop's strategy; all ranks call it at the same point.

    Args:
        run: the loop, whose module is wrapped already.
        recover: whether steps are retried. If not, the strategy's own reduction is left as it is.
    """
    model = run.wrapped
    if run.world_size == 1:
        return Ranks()
    if not recover or model is None:
        return Unretried(run, "recover=False")
    if isinstance(model, DistributedDataParallel):
        reason = why_no_late_reduction(model)
        return Unretried(run, reason) if reason else DataParallel(model)
    if not sharded_states(model):
        return Unretried(run, f"{run.ranks_by} is neither DDP nor FSDP2")
    reason = why_no_catch_up(model)
    return Unretried(run, reason) if reason else Sharded(model)


class Unretried(Ranks):
    """Ranks that can't or needn't agree on retries: the strategy reduces gradients by itself.

    Args:
        run: the loop of these ranks.
        reason: why steps are not retried.
        meets: ranks communicate in every micro-batch; if None, they do if the strategy shards.
    """

    def __init__(self, run: Run, reason: str, *, meets: bool | None = None) -> None:
        self.reason = reason
        self._run = run
        self.meets = run.meets_in_every_micro_batch if meets is None else meets
        self.exchanges = self.meets
        self.compares = not self.meets
        self.uncounted = "backward" if self.meets else "zeros"

    def totals(self, run: Callable[[], Sequence[float]]) -> list[float]:
        device = self._run.device
        numbers = torch.tensor(list(run()), dtype=torch.float64, device=device)
        with waiting_for_ranks("the ranks counted what a batch holds"):
            torch.distributed.all_reduce(numbers)
            return numbers.tolist()

    def most_parts(self, parts: int) -> int:
        return self.largest(parts) if self.meets else parts

    def largest(self, size: int) -> int:
        return int(largest_of_ranks(self._run, [size])[0])

    def largest_of(self, values: Sequence[float]) -> list[float]:
        return largest_of_ranks(self._run, values) if self.meets else list(values)

    def part(self, run: Callable[[], T], *, last: bool = False, **options: Any) -> T:
        with self._run.gradient_sync(wanted=last):
            return run()

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

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from lightning.pytorch import Trainer
from torch.nn.parallel import DistributedDataParallel

from lightning_memkit.distributed.catch_up import why_no_catch_up
from lightning_memkit.distributed.ddp import why_no_late_reduction
from lightning_memkit.distributed.fsdp2 import sharded_states
from lightning_memkit.distributed.timeouts import waiting_for_ranks
from lightning_memkit.optim.methods import local_optimizer
from lightning_memkit.plugins import _seam
from lightning_memkit.plugins._rank_alone import Ranks
from lightning_memkit.plugins._ranks_together import DataParallel, Sharded

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


def largest_of_ranks(trainer: Trainer, values: Sequence[float]) -> list[float]:
    """Each value's maximum over all ranks, exact for integers below 2**53."""
    if trainer.world_size == 1:
        return list(values)
    largest = torch.tensor(values, dtype=torch.float64, device=trainer.strategy.root_device)
    with waiting_for_ranks("the ranks compared numbers"):
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        return largest.tolist()  # where a device's collective is waited for


def sum_of_ranks(trainer: Trainer, values: Sequence[float]) -> list[float]:
    """Each value's sum over all ranks."""
    if trainer.world_size == 1:
        return list(values)
    summed = torch.tensor(values, dtype=torch.float64, device=trainer.strategy.root_device)
    torch.distributed.all_reduce(summed)
    return summed.tolist()


def values_of_ranks(trainer: Trainer, value: T) -> list[T]:
    """Each rank's value, which is pickled on its way."""
    if trainer.world_size == 1:
        return [value]
    values: list[Any] = [None] * trainer.world_size
    with waiting_for_ranks("the ranks told each other where they stand"):
        torch.distributed.all_gather_object(values, value)
    return values


def any_rank(trainer: Trainer, truth: bool) -> bool:
    """Whether it holds on at least one rank."""
    return largest_of_ranks(trainer, [float(truth)])[0] > 0


def averages_after_backward(trainer: Trainer, model: DistributedDataParallel) -> bool:
    """Whether a callback (`MemoryBudget`) is going to average DDP's gradients itself, whatever their dtype."""
    callbacks: Iterable[object] = vars(trainer)["callbacks"]
    wanted = any(getattr(callback, "averages_after_backward", False) for callback in callbacks)
    return (
        trainer.world_size > 1 and wanted and not why_no_late_reduction(model)
    )  # DDP itself serves a rank alone


def ranks_of(trainer: Trainer, *, recover: bool = True) -> Ranks:
    """What ranks do together under the trainer's strategy; all ranks call it at the same point.

    Args:
        trainer: its strategy has wrapped the model.
        recover: whether steps are to be retried. Otherwise the strategy's own reduction is left as it is.
    """
    model = trainer.strategy.model
    if trainer.world_size == 1:
        return Ranks()
    if not recover or model is None:
        return Unretried(trainer, "recover=False")
    if isinstance(model, DistributedDataParallel):
        reason = why_no_late_reduction(model)
        return Unretried(trainer, reason) if reason else DataParallel(model)
    if not sharded_states(model):
        return Unretried(trainer, f"{type(trainer.strategy).__name__} is neither DDP nor FSDP2")
    reason = why_no_catch_up(model)
    return Unretried(trainer, reason) if reason else Sharded(model)


class Unretried(Ranks):
    """Ranks that can't or needn't agree: the strategy reduces gradients by itself.

    Args:
        trainer: the trainer.
        reason: why steps are not retried.
        meets: ranks meet in every part; None: where the strategy shards.
    """

    def __init__(self, trainer: Trainer, reason: str, *, meets: bool | None = None) -> None:
        self.reason = reason
        self._trainer = trainer
        self.meets = _seam.communicates_in_every_part(trainer) if meets is None else meets
        self.exchanges = self.meets
        self.compares = not self.meets
        self.uncounted = "backward" if self.meets else "zeros"

    def totals(self, run: Callable[[], Sequence[float]]) -> list[float]:
        device = self._trainer.strategy.root_device
        numbers = torch.tensor(list(run()), dtype=torch.float64, device=device)
        with waiting_for_ranks("the ranks counted what a batch holds"):
            torch.distributed.all_reduce(numbers)
            return numbers.tolist()

    def most_parts(self, parts: int) -> int:
        return self.largest(parts) if self.meets else parts

    def largest(self, size: int) -> int:
        return int(largest_of_ranks(self._trainer, [size])[0])

    def largest_of(self, values: Sequence[float]) -> list[float]:
        return largest_of_ranks(self._trainer, values) if self.meets else list(values)

    def part(self, run: Callable[[], T], *, last: bool = False, **options: Any) -> T:
        with _seam.no_gradient_sync(self._trainer, block=not last):
            return run()

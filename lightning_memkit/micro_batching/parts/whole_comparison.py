"""Compare the loss of a batch in micro-batches with the whole batch's: rows may act on each other only among many.

An expert that takes at most so many rows, or a mean over the hardest 64 of a batch, is a plain mean of the few rows
whose gradients are compared.
"""

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor

from lightning_memkit.micro_batching.graph.loss_head import Edges
from lightning_memkit.micro_batching.parts.attempt import Attempt, loss_of, put_together, shares_of
from lightning_memkit.micro_batching.parts.loss_rounding import difference
from lightning_memkit.micro_batching.parts.partition import Partition
from lightning_memkit.micro_batching.parts.skipped_parts import LooksAtWhole
from lightning_memkit.micro_batching.proof.novelty import is_revised_after
from lightning_memkit.micro_batching.run import Step
from lightning_memkit.micro_batching.shares.foreseen import ManyRowsError
from lightning_memkit.micro_batching.sizes.sizing import with_batch_statistics

_UNEXPLAINED = 8  # batches that are compared if the loss's graph shows no divisors: one may agree by chance


class WholeComparison:
    """Compares batches that were probed, and one after 8, 16, 32 ... of all: a forward of the whole batch each.

    Where the step draws random numbers, or normalizes with the batch's statistics, the micro-batches run again, too.

    Args:
        looks: runs the forwards; None compares nothing.
        exact_window: batches of an accumulation window are weighed by what they count: a batch's loss is known only
            where it is a window.
        stated: the user says how batches are split or weighed, which is not doubted.

    Attributes:
        due: the batch at hand was probed.
        seconds: the time that comparisons have taken.
    """

    def __init__(
        self, looks: LooksAtWhole | None, *, exact_window: bool = False, stated: bool = False
    ) -> None:
        self.looks, self._exact_window, self._stated = looks, exact_window, stated
        self.due, self.seconds = False, 0.0
        self._head: Edges | None = None
        self._batches = 0

    def compare(self, step: Step, attempt: Attempt, partition: Partition) -> None:
        """Compare, if it is this batch's turn.

        Raises:
            ManyRowsError: the losses differ by more than rounding.
        """
        if self.looks is None or attempt.cut is None or len(attempt.losses) < 2:
            return
        if len(attempt.losses) < len(attempt.parts_logged):
            return  # `check_skipped` compares these
        if self._stated or (self._exact_window and not (step.starts_window and step.ends_window)):
            return
        self._batches += 1
        early = partition.combination.rules is None and self._batches <= _UNEXPLAINED
        head = partition.combination.head  # it grows where a later batch's loss has other functions
        if not (self.due or early or head != self._head or is_revised_after(self._batches)):
            return
        self.due, self._head, started = False, head, perf_counter()
        try:
            self._compare(step, attempt, partition, self.looks)
        finally:
            self.seconds += perf_counter() - started

    def _compare(self, step: Step, attempt: Attempt, partition: Partition, looks: LooksAtWhole) -> None:
        whole = looks(step, partition)
        if whole is None or whole.loss is None:
            return
        if whole.drew or with_batch_statistics(step.run.module):
            self._compare_with_equal_draws(step, attempt, partition)
        elif not partition.unlike or put_together(attempt) is not None:
            ours = loss_of(attempt, partition)
            if ours is not None and _rest_is_known(attempt, partition):
                _refuse_if_unlike(step, whole.loss, ours, _weighed(attempt.losses, attempt, partition))

    def _compare_with_equal_draws(self, step: Step, attempt: Attempt, partition: Partition) -> None:
        # Rows out of order would get the numbers of others; terms that weigh unlike are known of the step's own only.
        rests = partition.combination.rests
        apart = partition.unlike or (rests is not None and rests.seen)
        if self.looks is None or attempt.cut is None or attempt.rows is not None or apart:
            return
        losses = self.looks.with_equal_draws(step, partition, attempt.cut)
        if losses is None:
            return
        whole, *parts = losses
        summands = _weighed(parts, attempt, partition)
        _refuse_if_unlike(step, whole, torch.stack(summands).sum(), summands)


def _weighed(losses: Sequence[Tensor], attempt: Attempt, partition: Partition) -> list[Tensor]:
    """The losses of micro-batches, each times its weight in the batch's."""
    shares = shares_of(attempt, partition)
    return [loss.double().reshape(()) * share for loss, share in zip(losses, shares, strict=True)]


def _rest_is_known(attempt: Attempt, partition: Partition) -> bool:
    """Whether a part of the loss that has no gradient adds up as the others do, or is put together apart."""
    rests = partition.combination.rests
    return rests is None or not rests.untold and (not rests.seen or put_together(attempt) is not None)


def _refuse_if_unlike(step: Step, whole: Tensor, ours: Tensor, summands: Sequence[Tensor]) -> None:
    missed = difference(step, whole, ours, summands)
    if missed:
        shown = f"a loss of {float(whole):.6g} for the whole batch, and of {float(ours):.6g} for its micro-batches"
        raise ManyRowsError(shown, missed)

"""Compare a batch in micro-batches with the whole batch: rows may act on each other only among many.

An expert that takes at most so many rows, or a mean over the hardest 64 of a batch, is a plain mean of the few rows
whose gradients are compared; and the first 16 rows, kept for a logger, are all of them.
"""

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor

from lightning_memkit.micro_batching.batch_statistics import with_batch_statistics
from lightning_memkit.micro_batching.changes.composed_state import ComposedState
from lightning_memkit.micro_batching.graph.loss_head import Edges
from lightning_memkit.micro_batching.parts.attempt import Attempt, loss_of, put_together, shares_of
from lightning_memkit.micro_batching.parts.loss_rounding import (
    allowed_of_numbers,
    allowed_of_rows,
    difference,
)
from lightning_memkit.micro_batching.parts.part_values import PartValues
from lightning_memkit.micro_batching.parts.partition import Partition
from lightning_memkit.micro_batching.parts.skipped_parts import LooksAtWhole, WholeLook
from lightning_memkit.micro_batching.parts.whole_values import OfWhole, unlike
from lightning_memkit.micro_batching.proof.novelty import is_revised_after
from lightning_memkit.micro_batching.ranks.agreement import any_rank
from lightning_memkit.micro_batching.run import Step
from lightning_memkit.micro_batching.shares.foreseen import (
    ForeseenElsewhereError,
    ManyRowsError,
    ManyRowsStateError,
    UnforeseenLossError,
)

_MOST_NAMES = 32  # of returned values, after which one that is new has the batch compared no more
_UNEXPLAINED = 8  # batches that are compared if the loss's graph shows no divisors: one may agree by chance


class WholeComparison:
    """Compares batches that are `due` or return something new, and one after 8, 16, 32 ... of all.

    That is a forward of the whole batch each.

    Where the step draws random numbers, or normalizes with the batch's statistics, the micro-batches run again, too.

    Args:
        looks: runs the forwards; None compares nothing.
        exact_window: batches of an accumulation window are weighed by what they count: a batch's loss is known only
            where it is a window.
        stated: the user says how batches are split or weighed, so that their losses are not doubted.
        of_ranks: runs the forwards where several ranks agree on what they show; only losses are compared then.

    Attributes:
        due: the batch at hand was probed, or has more than others (see `Weighing.has_more`).
        seconds: the time that comparisons have taken.
    """

    def __init__(
        self,
        looks: LooksAtWhole | None,
        *,
        exact_window: bool = False,
        stated: bool = False,
        of_ranks: LooksAtWhole | None = None,
    ) -> None:
        self.looks, self._exact_window, self._stated = looks, exact_window, stated
        self._of_ranks = of_ranks
        self.due, self.seconds = False, 0.0
        self._head: Edges | None = None
        self._state: ComposedState | None = None
        self._names = set[str]()  # of what was returned
        self._batches = 0
        self._refused = frozenset[str]()  # state that was named; a user who states how to split goes on

    def compare(self, step: Step, attempt: Attempt, partition: Partition, values: PartValues) -> None:
        """Compare, if it is this batch's turn; `values` learns how numbers add up.

        Raises:
            ManyRowsError: the losses differ by more than rounding.
            ManyRowsStateError: what is left in the module has other rows.
        """
        values.of_whole = None
        if self._of_ranks is not None and not (self._stated or self._exact_window):
            self._compare_on_ranks(step, attempt, partition, self._of_ranks)
        if self.looks is None or attempt.cut is None or len(attempt.losses) < 2:
            return
        if self.looks.has_lost_batch:  # its turn passes on to the next one
            return
        if len(attempt.losses) < len(attempt.parts_logged):
            return  # `check_skipped` compares these
        state = partition.combination.state
        is_batch = not self._exact_window or (step.starts_window and step.ends_window)
        of_loss = is_batch and not self._stated
        has_more = state is not None or any(attempt.extras) or any(entries for _, entries in attempt.logged)
        if not (of_loss or has_more):
            return
        self._batches += 1
        early = of_loss and partition.combination.rules is None and self._batches <= _UNEXPLAINED
        head = partition.combination.head  # it grows where a later batch's loss has other functions
        names = {name for extra in attempt.extras for name in extra} - self._names
        is_new = head != self._head or state is not self._state
        is_new = is_new or 0 < len(names) <= _MOST_NAMES - len(self._names)
        self._names |= names
        if not (self.due or early or is_new or is_revised_after(self._batches)):
            return
        self.due, self._head, self._state, started = False, head, state, perf_counter()
        try:
            whole = self.looks(step, partition)
            if whole is not None and whole.loss is not None:
                if of_loss:
                    self._compare(step, attempt, partition, whole)
                self._compare_values(step, attempt, partition, values, whole)
        finally:
            self.seconds += perf_counter() - started

    def _compare_on_ranks(
        self, step: Step, attempt: Attempt, partition: Partition, looks: LooksAtWhole
    ) -> None:
        """Compare each rank's loss, if it is this batch's turn on all of them.

        A rank's micro-batches add up to its part in the mean over all ranks' rows, and are compared with that part.

        Raises:
            ManyRowsError: the losses differ by more than rounding.
            WholeTermsError: the whole batch's has other terms.
            ForeseenElsewhereError: so it is on another rank.
        """
        self._batches += 1
        is_early = partition.combination.rules is None and self._batches <= _UNEXPLAINED
        if not (self.due or is_early or is_revised_after(self._batches)):
            return
        rests = partition.combination.rests
        is_told = rests is None or not (rests.untold or rests.seen)
        is_split = 1 < len(attempt.losses) == len(attempt.parts_logged)
        if any_rank(step.run, not (is_told and is_split) or looks.has_lost_batch):
            return  # its turn passes on to the next one
        self.due, failure = False, None
        try:
            whole = looks(step, partition, attempt.shares_of_rank)
            if whole is not None and not (whole.drew or with_batch_statistics(step.run.module)):
                _compare_part(step, attempt, partition, whole)
        except UnforeseenLossError as error:
            failure = error
        if any_rank(step.run, failure is not None):
            raise failure or ForeseenElsewhereError("on another rank")

    def _compare_values(
        self, step: Step, attempt: Attempt, partition: Partition, values: PartValues, whole: WholeLook
    ) -> None:
        """Compare what is logged, returned, and left in the module; of random values only their shapes."""
        assert whole.loss is not None
        is_random = whole.drew or with_batch_statistics(step.run.module)
        values.note_losses(whole.loss, attempt.losses, whole.logged, whole.returned)
        numbers = None if is_random else allowed_of_numbers(step, whole.loss)
        if numbers is not None:
            shares = shares_of(attempt, partition)
            values.logs.compare_whole(whole.logged, attempt.logged, attempt.sizes_logged, numbers)
            values.returned.compare_whole(whole.returned, attempt.extras, shares, attempt.sizes, numbers)
        # Where micro-batches are formed by tokens, what stands at padding is not the whole batch's.
        is_narrow = attempt.cut is not None and attempt.cut.places is not None
        allowed = float("inf") if is_random or is_narrow else allowed_of_rows(step, whole.loss)
        values.of_whole = OfWhole(returned=whole.returned, allowed=allowed)
        if partition.combination.state is not None:
            names = {*unlike(partition.combination.state.left(), whole.left, allowed)} - self._refused
            self._refused |= names
            if names:
                shown = ", ".join(sorted(names))
                raise ManyRowsStateError(f"the whole batch leaves other rows in {shown}", frozenset(names))

    def _compare(self, step: Step, attempt: Attempt, partition: Partition, whole: WholeLook) -> None:
        assert whole.loss is not None
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


def _compare_part(step: Step, attempt: Attempt, partition: Partition, whole: WholeLook) -> None:
    """Compare a rank's part in the mean over all ranks' rows, as its micro-batches and its whole batch show it."""
    told, summands = whole.weighed, [one for one in attempt.contributions if one is not None]
    if put_together(attempt) is None:
        told = None if partition.unlike else whole.loss
        summands = _weighed(attempt.losses, attempt, partition)
    if told is not None:
        _refuse_if_unlike(step, told, torch.stack(summands).sum(), summands)


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

"""The interface by which ranks coordinate a step, implemented for one rank, which needs no coordination."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

from torch import nn

T = TypeVar("T")


class Ranks:
    """A single rank: everything runs without communication.

    Attributes:
        reason: why steps are not retried; empty if they are.
        uncounted: what a micro-batch of weight zero must still run so that no rank waits. `"skip"`: no
            backward; `"zeros"`: a backward that leaves zeros in all gradients; `"backward"`: its own, of its
            loss times zero, because it communicates.
        meets: ranks communicate in every micro-batch, so that all must run the same number.
        compares: gradients are complete after a micro-batch, so that they can be compared with the whole
            batch's.
        exchanges: a micro-batch's results may depend on the other ranks' micro-batches, so that a rank with
            fewer may not repeat one to make up the number.
    """

    reason = ""
    meets = False
    compares = True
    exchanges = False
    uncounted: Literal["skip", "zeros", "backward"] = "skip"

    def begin_step(self, *, starts_window: bool) -> None:
        """Call before the state before a step is recorded for a retry."""

    def totals(self, run: Callable[[], Sequence[float]]) -> list[float]:
        """Call `run`, which returns at most eight numbers, and add them up over all ranks.

        Raises:
            OutOfMemoryError: on all ranks, if one ran out of memory.
        """
        return list(run())

    def most_parts(self, parts: int) -> int:
        """How many micro-batches each rank must run: the most of any rank, if ranks communicate in each."""
        return parts

    def largest(self, size: int) -> int:
        """The largest of all ranks' sizes, so that after an OOM all ranks halve the same size."""
        return size

    def largest_of(self, values: Sequence[float]) -> list[float]:
        """Each value's maximum over the ranks if they communicate in every micro-batch; else this rank's."""
        return list(values)

    def any(self, truth: bool) -> bool:
        """Whether it holds on any rank of `largest_of`."""
        return self.largest_of([float(truth)])[0] > 0

    def part(
        self,
        run: Callable[[], T],
        *,
        counts: bool = True,
        last: bool = False,
        smallest: Callable[[], object] | None = None,
        kind: str = "train",
    ) -> T:
        """Run one micro-batch: its transfer, forward and backward.

        Args:
            run: runs it; must keep none of its tensors alive after a failure.
            counts: whether it adds to sharded gradients; if not, it adds exactly zero, even for a loss of
                nan.
            last: it is the last of its accumulation window: if DDP reduces by itself, it does so in this
                backward.
            smallest: forward and backward of one row. Under sharding, a rank runs it to catch up with the
                others if its very first micro-batch fails.
            kind: the kind of pass ("train", "survey", "validation_step 0"), because they communicate differently.

        Raises:
            OutOfMemoryError: under sharding on all ranks if one ran out of memory; else only on this rank.
            ForeseenWronglyError: likewise.
            CannotCatchUpError: this rank and its peers can't go on.
        """
        return run()

    def alike(self, run: Callable[[], T]) -> T:
        """Call `run`, which runs micro-batches only for what they show; an error of one rank is raised on all.

        Raises:
            OutOfMemoryError, ForeseenWronglyError: on all ranks, if on one.
        """
        return run()

    def forget_part(self) -> None:
        """Call after a micro-batch that raised another error on all ranks, and is not retried."""

    def attempt(self, run: Callable[[], T], *, ends_window: bool) -> T:
        """Run all micro-batches of a batch; at a window's end, gradients are reduced over ranks afterwards.

        Raises:
            OutOfMemoryError: on all ranks, if one ran out of memory.
        """
        return run()

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> bool:
        """Clip gradients by their norm, bitwise as torch does, if that takes communication; True if clipped.

        Raises:
            OutOfMemoryError: on all ranks, if one ran out of memory.
        """
        return False

    def completed(self, run: Callable[[], None]) -> None:
        """Run what follows the micro-batches of a batch: if memory runs out on one rank, all raise."""
        run()

    def optimizer_steps(self) -> None:
        """Agree that all ranks take the optimizer's step.

        Raises:
            OutOfMemoryError: on all ranks, if one ran out of memory since the backward.
        """

    def failed(self) -> None:
        """Tell the other ranks that this one ran out of memory, unless they know already.

        Raises:
            CannotCatchUpError: they wait in a collective that this rank can't join.
        """

    def close(self) -> None:
        """Release process groups, and undo what was patched."""

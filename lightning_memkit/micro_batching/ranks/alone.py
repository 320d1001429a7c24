"""A step of one rank: what the classes for several ranks do more, as an interface."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

from torch import nn

T = TypeVar("T")


class Ranks:
    """A rank that is alone: everything runs as it is.

    Attributes:
        reason: why steps are not retried; empty where they are.
        uncounted: what other ranks need of a part in which nothing counts: no backward; one that leaves zeros in all
            gradients; or its own, since it communicates (of its loss times zero).
        meets: ranks meet in every part, so that all have to run as many.
        compares: a part's gradients are there once it has run, so that they can be compared with the whole batch's.
        exchanges: a part's results may depend on the other ranks' parts, so that none may be repeated as a stopgap.
    """

    reason = ""
    meets = False
    compares = True
    exchanges = False
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

    def largest_of(self, values: Sequence[float]) -> list[float]:
        """Each value's maximum over the ranks, where they meet in every part; elsewhere this rank's."""
        return list(values)

    def any(self, truth: bool) -> bool:
        """Whether it holds on a rank that takes part."""
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
        """Run one part: its transfer, forward and backward.

        Args:
            run: does it, and keeps nothing of it alive where it fails.
            counts: what it adds to sharded gradients is kept; otherwise it is exactly zero, also for a loss of nan.
            last: it ends a window: where DDP reduces by itself, it does so in this part's backward.
            smallest: forward and backward of one row, for sharded ranks of which one fails in the first part ever.
            kind: tells parts of other passes (validation) apart, which communicate otherwise.

        Raises:
            OutOfMemoryError: sharded: on all ranks, where one failed; else where this one did.
            ForeseenWronglyError: likewise.
            CannotCatchUpError: this rank has to end, and its peers with it.
        """
        return run()

    def forget_part(self) -> None:
        """After a part that raised another error on all ranks, and is not repeated."""

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

"""Refuse state that a batch's micro-batches change, where trials have not seen a step change it, or not like this."""

from lightning_memkit.micro_batching.changes.composed_state import ComposedState
from lightning_memkit.micro_batching.changes.step_watch import StepWatch
from lightning_memkit.micro_batching.ranks.agreement import Ranks, any_rank
from lightning_memkit.micro_batching.run import Run
from lightning_memkit.micro_batching.shares.foreseen import ForeseenElsewhereError, StateChangedError


class WatchedParts:
    """Compares what the micro-batches of a batch change with what trials have seen.

    Args:
        run: the loop.
        watch: knows what trials have seen steps change.

    Attributes:
        ranks: coordinates the ranks in each step.
    """

    def __init__(self, run: Run, watch: StepWatch) -> None:
        self.ranks = Ranks()
        self._run, self._watch = run, watch

    def begin(self) -> None:
        """The micro-batches of a batch begin."""
        self._watch.begin()

    def check(self, position: int, of: int) -> None:
        """Look at what the micro-batches so far have changed, of which this was the `position`-th of so many.

        After the first, because what can't be restored has then changed only once; and after the last.

        Raises:
            StateChangedError: no trial has seen a step change it.
        """
        is_split, is_last = of > 1, position == of - 1
        # Without retries, a rank alone must not leave the others in their reduction: all decide after the last.
        apart = bool(self.ranks.reason) and self._run.world_size > 1
        if not (is_last if apart else is_split and (position == 0 or is_last)):
            return
        names = self._watch.unknown() if is_split else frozenset[str]()
        if apart and not any_rank(self._run, bool(names)):
            return
        if names:
            raise StateChangedError(f"its micro-batches change {', '.join(sorted(names))}", names)
        if apart:
            raise ForeseenElsewhereError("on another rank")

    def unsettled(self, state: ComposedState, doubtful: frozenset[str]) -> str:
        """The names of state for which the learned rules give no answer, and looking again has given none.

        Args:
            state: what the micro-batches have left.
            doubtful: the names for which its rules give no answer.

        Raises:
            StateChangedError: no trial has compared such values, or they are counts, on which a loss may depend.
        """
        names = ", ".join(sorted(doubtful))
        together = self._run.world_size == 1 or not (self.ranks.meets or self.ranks.reason)
        if doubtful and together and (not doubtful <= self._watch.looked_at or state.counts(doubtful)):
            raise StateChangedError(f"how {names} adds up over micro-batches is unknown", doubtful)
        return names

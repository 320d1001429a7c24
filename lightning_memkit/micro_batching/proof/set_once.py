"""Tell a mask or a cache, which any rows make alike, from a value that the first rows set: a baseline, an anchor."""

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor

from lightning_memkit.micro_batching import picked_rows, split_batch
from lightning_memkit.micro_batching.changes.composed_state import ComposedState
from lightning_memkit.micro_batching.changes.composition import Left, compose
from lightning_memkit.micro_batching.changes.rollback import Rollback
from lightning_memkit.micro_batching.changes.step_changes import StepChange
from lightning_memkit.micro_batching.changes.step_watch import StepWatch
from lightning_memkit.micro_batching.changes.value_walk import Keys
from lightning_memkit.micro_batching.proof.lost_state import warn_of_lost
from lightning_memkit.micro_batching.proof.some_rows import count_of_rows
from lightning_memkit.micro_batching.proof.without_noise import quiet
from lightning_memkit.micro_batching.ranks.alone import Ranks
from lightning_memkit.micro_batching.run import Run, Step


class Steps(Protocol):
    """Runs a step on some rows, and knows what steps change; implemented by `Trials`."""

    changes: tuple[StepChange, ...]
    changing: Keys
    ranks: Ranks
    watch: StepWatch

    def kept(self, step: Step, *parts: Any) -> Rollback:
        """Record the state that a step may change."""
        ...

    def run(self, step: Step, batch: Any) -> bool:
        """Forward and backward of some rows."""
        ...


class SetOnce:
    """Judges what a step has changed and further steps don't change.

    Args:
        run: the loop.
        trials: runs steps on some rows.
    """

    def __init__(self, run: Run, trials: Steps) -> None:
        self._run, self._trials = run, trials

    def alike(self, step: Step, batch: Any, once: set[str], others: Iterable[StepChange]) -> set[str]:
        """Of some names, those whose values each micro-batch leaves as the whole does, alone and after another one.

        A cache by the number of rows, which has other entries after micro-batches, is one of them if these depend on
        the number only. A number or a text that takes another one's place is none: a later batch may do so for some
        rows only. Costs four steps; one more for such a cache, and as many in eval mode if values differ.

        Args:
            step: the current step, in the state from which the changes were made.
            batch: the rows that made them.
            once: the names.
            others: what the step changes besides; as in training, what does not compose is reset between
                micro-batches.
        """
        if self._trials.ranks.any(count_of_rows(batch) < 2):
            return set()
        replaced = ComposedState(self._run.module, sorted(once), 0.0)
        replaced.begin()
        once = once - replaced.plain
        if not self._trials.ranks.any(bool(once)):
            return set()
        names = [c.name for c in others if not c.composes and c.kind in ("attribute", "container")]
        found = set[str]()
        for level in (0, 2):
            with quiet(self._run.module, level):
                rollback = self._trials.kept(step, batch)
                try:
                    found |= self._compared(step, batch, rollback, names) & once
                except Exception as error:  # a micro-batch may have too few rows for the module
                    self._run.debug(
                        f"MemoryBudget can't try in micro-batches what a step sets once: {error!r}"
                    )
                finally:
                    self._restore(rollback)
            if not self._trials.ranks.any(bool(once - found)):
                break
        return found

    def _compared(self, step: Step, batch: Any, rollback: Rollback, resets: list[str]) -> set[str]:
        rows = count_of_rows(batch)
        # With two equal halves, a mean of their means would pass for the mean.
        first = rows // 2 if rows % 2 or rows == 2 else rows // 2 - 1
        one, other = split_batch(batch, [first, rows - first])
        others = ComposedState(self._run.module, resets, 0.0)
        others.begin()

        def left_by(part: Any, *, after: bool = False) -> Left:
            others.begin_anew() if after else self._restore(rollback)
            with rollback.watching():
                self._trials.run(step, part)
            return rollback.left_behind()

        whole, second = left_by(batch), left_by(other)
        first, both = left_by(one), left_by(other, after=True)
        alike = compose(whole, first) & compose(whole, second) & compose(whole, both)
        cached = {change for change in whole.keys() & both.keys() if _is_of_size(whole[change], both[change])}
        if self._trials.ranks.any(bool(cached - alike)):
            alike |= compose(whole, left_by(picked_rows(batch, [0] * rows))) & cached
        return {change.name for change in alike}

    def _restore(self, rollback: Rollback) -> None:
        try:
            self._trials.changing |= rollback.changed()
        finally:
            lost = rollback.restore()
        warn_of_lost(lost)


def _is_of_size(whole: list[tuple[int, Any, Any]], parts: list[tuple[int, Any, Any]]) -> bool:
    """Whether values have other shapes or entries after micro-batches."""
    return len(whole) == len(parts) and any(
        _has_other_form(a, b) for (*_, a), (*_, b) in zip(whole, parts, strict=True)
    )


def _has_other_form(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape != b.shape
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() != b.keys() or any(_has_other_form(value, b[key]) for key, value in a.items())
    return isinstance(a, set) and isinstance(b, set) and a != b

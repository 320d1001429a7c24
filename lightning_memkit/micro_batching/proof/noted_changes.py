"""Find out what a step changes besides gradients every time that it runs, and which changes compose.

A change composes if micro-batches, run in sequence, leave what the whole batch leaves.
"""

from dataclasses import replace
from typing import Any

from lightning_memkit.micro_batching import split_batch
from lightning_memkit.micro_batching.changes.composition import Left, compose
from lightning_memkit.micro_batching.changes.rollback import Rollback
from lightning_memkit.micro_batching.changes.step_changes import ChangeKind, StepChange
from lightning_memkit.micro_batching.proof.lost_state import warn_of_lost
from lightning_memkit.micro_batching.proof.set_once import SetOnce, Steps
from lightning_memkit.micro_batching.proof.some_rows import count_of_rows, other_rows
from lightning_memkit.micro_batching.proof.without_noise import quiet
from lightning_memkit.micro_batching.run import Run, Step

_Named = tuple[ChangeKind, str]  # a change's kind and name


class NotedChanges:
    """Distinguishes what every step changes from what only the first one does; sets `changes` of `trials`.

    Args:
        run: the loop.
        trials: runs steps on other rows.
    """

    def __init__(self, run: Run, trials: Steps) -> None:
        self._run, self._trials = run, trials
        self._set_once = SetOnce(run, trials)
        self._once: set[_Named] = set()  # changes that a second step does not repeat, and any rows make alike
        self._always: dict[_Named, StepChange] = {}
        self._rows: dict[_Named, int] = {}  # of this rank, on how many these were judged
        self._judged: set[_Named] = set()  # changes of which it is known whether they compose

    def forget(self, names: frozenset[str]) -> None:
        """Judge these changes anew when a trial sees them again."""
        self._once = {named for named in self._once if named[1] not in names}
        self._judged = {named for named in self._judged if named[1] not in names}
        self._always = {named: one for named, one in self._always.items() if named[1] not in names}

    def note(self, step: Step, batch: Any, rollback: Rollback, logged: list[dict[str, Any]]) -> None:
        """Set the changes that every step makes, and whether they compose.

        Costs about three more steps when a name is new, and as many in eval mode if a change does not compose in
        train mode; six more if a further step does not repeat it; none if a step changes nothing.
        """
        found, rows, count = rollback.changes(), count_of_rows(batch), len(logged)
        # One row can't be split, and two not into micro-batches of different size: judge again with more rows.
        as_now = {named for named in self._always if self._rows[named] >= min(rows, 3)}
        names = {_named(change) for change in found} - self._once - self._judged
        unknown = names - as_now
        if not self._trials.ranks.reason and self._trials.ranks.any(bool(unknown)):
            # What a rank has too few rows for, none tries; and what one judges again, all do.
            fewest, unknown = -int(self._trials.ranks.largest_of([-rows])[0]), names
            self._trials.changing |= rollback.changed()  # before further runs restore something
            again = self._changes_of_a_second_step(step, batch)
            once = set[_Named]() if again is None else unknown - again.keys()
            if self._trials.ranks.any(bool(once)):
                same = self._changes_of_the_same_rows(step, batch, once)
                again, once = None if again is None else again | same, once - same.keys()
            if self._trials.ranks.any(bool(once)):
                unlike = self._unlike_in_parts(step, batch, rollback, once, again or {})
                again = None if again is None else again | unlike
            del logged[count:]
            if again is not None:
                # Damped when a loss rises, say: that the next rows did not do it does not make it a thing done once.
                states = {_named(one): one for one in found if one.kind == "optimizer_state"}
                again = states | again
                # A change that was judged without batch statistics keeps its verdict.
                again = {named: change for named, change in again.items() if named not in self._judged}
                self._always = {
                    named: one for named, one in self._always.items() if named not in unknown
                } | again
                self._rows.update(dict.fromkeys(again, rows))
                self._judged |= again.keys() if fewest > 2 else set()
                self._once = (self._once | (unknown if fewest > 1 else set())) - self._always.keys()
                self._trials.watch.judged(name for _, name in self._once)
                found = (*found, *again.values())
        self._trials.changes = tuple(
            {self._always.get(_named(c), c): None for c in found if _named(c) not in self._once}
        )

    def _changes_of_a_second_step(self, step: Step, batch: Any) -> dict[_Named, StepChange] | None:
        """What a second step changes, on other rows, and which of these changes compose; None if it fails."""
        rows, failure = other_rows(step.batch, batch), ""
        rollback, any_rank = self._trials.kept(step, rows), self._trials.ranks.any
        try:
            with rollback.watching():
                self._trials.run(step, rows)
        except Exception as error:  # these rows don't matter: the first step itself has succeeded
            failure = repr(error)
        if any_rank(bool(failure)):
            self._run.debug(f"MemoryBudget can't try a second step: {failure or 'on another rank'}")
            return None
        again, left = rollback.changes(), rollback.left_behind()
        self._trials.changing |= rollback.changed()
        # Steps communicate where weights are sharded: all ranks run them, or none does.
        composed = self._composed(step, rows, rollback, left) if any_rank(bool(again)) else frozenset()
        if any_rank(bool(set(again) - composed)):
            composed |= self._composed_without_noise(step, rows)
        return {_named(change): replace(change, composes=change in composed) for change in again}

    def _changes_of_the_same_rows(
        self, step: Step, batch: Any, wanted: set[_Named]
    ) -> dict[_Named, StepChange]:
        """Of some changes, those that the same rows make again: they may be of rare rows, which others are not."""
        rollback = self._trials.kept(step, batch)
        try:
            with rollback.watching():
                self._trials.run(step, batch)
        except Exception as error:  # as in a second step
            self._run.debug(f"MemoryBudget can't try a step again: {error!r}")
            return {}
        self._trials.changing |= rollback.changed()
        return {_named(change): change for change in rollback.changes() if _named(change) in wanted}

    def _unlike_in_parts(
        self,
        step: Step,
        batch: Any,
        rollback: Rollback,
        once: set[_Named],
        again: dict[_Named, StepChange],
    ) -> dict[_Named, StepChange]:
        """Of changes that no step repeats, those that micro-batches leave other than the whole does."""
        found = {_named(change): change for change in rollback.changes()}
        judged = {named: change for named, change in self._always.items() if named in self._judged}
        others = [change for named, change in (found | again | judged).items() if named not in once]
        lost = rollback.restore()
        warn_of_lost(lost)
        alike = self._set_once.alike(step, batch, {name for _, name in once}, others)
        return {(kind, name): StepChange(kind=kind, name=name) for kind, name in once if name not in alike}

    def _composed_without_noise(self, step: Step, rows: Any) -> frozenset[StepChange]:
        """The changes that compose in eval mode, where dropout draws no other numbers in micro-batches."""
        with quiet(self._run.module, 2):
            rollback = self._trials.kept(step, rows)
            try:
                with rollback.watching():
                    self._trials.run(step, rows)
            except Exception as error:  # a training step need not run in eval mode
                self._run.debug(f"MemoryBudget can't try a step in eval mode: {error!r}")
                return frozenset()
            return self._composed(step, rows, rollback, rollback.left_behind())

    def _composed(self, step: Step, rows: Any, rollback: Rollback, left: Left) -> frozenset[StepChange]:
        """The changes that two micro-batches of different size leave as the whole does.

        If the second one alone leaves the same, it may have overwritten what the first has left: for such
        changes, the micro-batches run in the other order as well.
        """
        total = count_of_rows(rows)
        if self._trials.ranks.any(total < 3):  # on no rank, where one has too few rows, or none to split
            return frozenset()
        # With two equal halves, a mean of their means would pass for the mean.
        first = total // 2 if total % 2 else total // 2 - 1
        rollback.restore()
        try:
            one, other = split_batch(rows, [first, total - first])
            with rollback.watching():
                self._trials.run(step, one)
                self._trials.run(step, other)
            composed = compose(left, rollback.left_behind())
            if not composed:
                return composed
            rollback.restore()
            with rollback.watching():
                self._trials.run(step, other)
                doubtful = compose(left, rollback.left_behind()) & composed
                if doubtful:
                    self._trials.run(step, one)
            return composed - doubtful | (doubtful & compose(left, rollback.left_behind()))
        except Exception as error:  # a micro-batch may have too few rows for the module
            self._run.debug(f"MemoryBudget can't try a step in micro-batches: {error!r}")
            return frozenset()


def _named(change: StepChange) -> _Named:
    return change.kind, change.name

"""Tell a state that a step in micro-batches changes, and that no trial has seen a step change."""

from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from lightning_memkit.micro_batching.changes.rollback import Rollback

_TRUSTED = 3  # times that trials have found a change to be one that the next step does not repeat


class StepWatch:
    """Compares what a step changes with what trials have seen steps change; milliseconds for thousands of modules.

    A teacher that is updated after a warm-up, or a counter of rare events, changes for the first time when all trials
    are over. In micro-batches it would change once in each of them.

    Attributes:
        known: the names of what steps were seen to change.
        once: of these, what a further step does not change again (a mask that is built lazily): it may change once
            more, in training.
        looked_at: the names that trials of the batch at hand have looked at again.
    """

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.once: frozenset[str] = frozenset()
        self.looked_at: frozenset[str] = frozenset()
        self._has_seen = False
        self._rollback: Rollback | None = None
        self._before: frozenset[str] = frozenset()
        self._changing: set[str] = set()  # of `once`, what the step at hand changes
        self._spent: set[str] = set()
        self._judged: Counter[str] = Counter()

    def seen(self, rollback: Rollback) -> None:
        """Note what a trial has changed whose changes are judged."""
        self._has_seen = True
        self.known |= rollback.touched()

    def start(self, rollback: Rollback) -> None:
        """A step begins, whose state is kept in `rollback`; not called again when it is retried."""
        self._spent |= self._changing
        self._changing = set()
        self._rollback, self._before, self.looked_at = rollback, frozenset(), frozenset()

    def forget(self) -> None:
        """Let go of the last step's state."""
        self._rollback = None

    def put_batch_back(self) -> None:
        """Write into the batch what it held before the step, whose micro-batches may be views of it."""
        if self._rollback is not None:
            self._rollback.put_batch_back()

    @property
    def has_lost_batch(self) -> bool:
        """Whether that is unknown, as this step was the first to change a batch in place."""
        return self._rollback is not None and self._rollback.has_lost_batch

    def begin(self) -> None:
        """Its micro-batches begin: what hooks or an optimizer have changed before is not theirs."""
        self._before = self.touched()

    def touched(self) -> frozenset[str]:
        """What was written to or set since the step began."""
        return frozenset() if self._rollback is None else self._rollback.touched()

    def tensors(self, names: frozenset[str]) -> list[Tensor]:
        """The tensors among what has these names."""
        return [] if self._rollback is None else self._rollback.tensors_of(names)

    def passes_over(self, names: Iterable[str]) -> None:
        """What a hook has changed that runs once a step, between the micro-batches."""
        self._before |= frozenset(names)

    def unknown(self) -> frozenset[str]:
        """What the micro-batches have changed, and no trial has; empty if no trial was watched."""
        if not self._has_seen or self._rollback is None:
            return frozenset()
        touched = self.touched() - self._before
        new = (touched - self.known) | (touched & self._spent & self.once)
        self._changing |= touched & self.once
        if not new:
            return new
        # Numbers that were set to what they were are no change. Values are compared here only, where it is rare.
        return new & {change.name for change in self._rollback.changes()}

    def accept(self, names: Iterable[str]) -> None:
        """The trials have looked at these changes: from now on they are known."""
        names = frozenset(names)
        self._judged.update(names & self.once)
        self.known |= names
        self.looked_at |= names
        self._spent -= names
        self._changing -= names

    def judged(self, once: Iterable[str]) -> None:
        """Trials have found that a further step does not repeat these changes."""
        self.once = frozenset(name for name in once if self._judged[name] < _TRUSTED)

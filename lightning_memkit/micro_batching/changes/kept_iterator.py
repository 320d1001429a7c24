"""Snapshot of an iterator that a step may advance; after a restore it yields the same items again."""

from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from lightning_memkit.micro_batching.changes.kept_state import Kept
from lightning_memkit.micro_batching.changes.kept_tensor import Place
from lightning_memkit.micro_batching.changes.step_changes import StepChange
from lightning_memkit.utilities.rewindable import Rewindable


class KeptIterator(Kept):
    """Snapshot of the position of a `Rewindable`."""

    def __init__(self, place: Place, owner: Rewindable) -> None:
        self.place, self._mark = place, owner.mark()

    @override
    def changes(self) -> Iterator[StepChange]:
        if self._mark.was_passed:
            yield self.place.change()

    @override
    def now(self, change: StepChange) -> Any:
        return self._mark.iterator.position

    @override
    def before(self, now: Any) -> Any:
        return None

    @override
    def restore(self) -> None:
        self._mark.go_back()

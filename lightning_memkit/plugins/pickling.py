"""Let plugins be pickled, copied and spawned with their options and results, without the current run."""

from collections.abc import Callable
from typing import Any, ClassVar


def nothing() -> None:
    """An undo that does nothing."""


class LeavesRunBehind:
    """Copies and pickles keep options and results; a run's patches and meters stay with the original.

    Attributes:
        of_run: by attribute that is left out, a factory of its initial value.
    """

    of_run: ClassVar[dict[str, Callable[[], Any]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), **{name: make() for name, make in self.of_run.items() if name in vars(self)}}

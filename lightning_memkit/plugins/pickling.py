"""Plugins that a user pickles, copies or spawns: with their options and results, without the run under way."""

from collections.abc import Callable
from typing import Any, ClassVar


def nothing() -> None:
    """The undo where there is nothing to undo."""


class LeavesRunBehind:
    """A copy or a pickle holds options and results; patches, meters and what else a run needs stay with the original.

    Attributes:
        of_run: what makes the attributes anew that are left out.
    """

    of_run: ClassVar[dict[str, Callable[[], Any]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), **{name: make() for name, make in self.of_run.items() if name in vars(self)}}

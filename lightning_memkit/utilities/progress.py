"""A progress bar for what takes longer than two seconds; starts no thread, so that forks stay safe."""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

_PATIENCE_SECONDS, _REFRESH_SECONDS = 2.0, 0.2
_LINES = 12  # the most above the bar: the latest
_T = TypeVar("_T")


class ProgressBar:
    """Shows progress after two seconds; disappears at the end, and never appears in log files.

    It draws only when something is reported, and only on the first rank. It is for work before Lightning's own bars
    are on the terminal.

    Args:
        what: the activity, such as "reading weights".
        total: the number of units; None if unknown.
        unit: such as "documents"; "bytes" are shown in binary units.
    """

    def __init__(self, what: str, total: int | None = None, unit: str = "") -> None:
        self._what, self._total, self._unit = what, total, unit
        self._began = self._drawn = 0.0
        self._done = 0
        self._lines: dict[str, None] = {}  # in their order, each once
        self._bar: Any = None
        self._is_hidden = not sys.stderr.isatty() or os.environ.get("LOCAL_RANK", "0") != "0"

    def __enter__(self) -> "ProgressBar":
        self._began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def advance(self, by: int = 1) -> None:
        """Report that `by` more units are done."""
        self.reach(self._done + by)

    def found(self, line: str) -> None:
        """Report a result, which stands above the bar until the end."""
        self._lines[line] = None
        self.reach(self._done)

    def reach(self, done: int) -> None:
        """Report that so many units are done in all."""
        self._done = done
        now = time.monotonic()
        if self._is_hidden or now - self._began < _PATIENCE_SECONDS or now - self._drawn < _REFRESH_SECONDS:
            return
        self._drawn = now
        if self._bar is None:
            self._bar = self._started()
        self._bar.update(self._bar.task_ids[0], completed=self._done, refresh=True)

    def over(self, items: Iterable[_T]) -> Iterator[_T]:
        """Iterate over items, each counting as a unit that is done when the next is requested."""
        for item in items:
            yield item
            self.advance()

    def _started(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
        from rich.text import Text

        count = DownloadColumn(binary_units=True) if self._unit == "bytes" else MofNCompleteColumn()
        far = ("{task.completed}",) if self._total is None else (BarColumn(), count)
        unit = "" if self._unit == "bytes" else self._unit
        columns = ("{task.description}", *far, unit, TimeElapsedColumn())
        lines = self._lines

        class BelowLines(Progress):
            def get_renderables(self) -> Iterator[Any]:
                yield from (Text(line, no_wrap=True, overflow="ellipsis") for line in [*lines][-_LINES:])
                yield from super().get_renderables()

        bar = BelowLines(*columns, console=Console(file=sys.stderr), transient=True, auto_refresh=False)
        bar.add_task(self._what, total=self._total)
        bar.start()
        return bar

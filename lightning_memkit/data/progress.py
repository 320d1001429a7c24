"""How far work has come: a bar for what takes longer than two seconds, and what a loader has dealt."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

_AFTER_SECONDS = 2.0

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What was dealt to all ranks.

    Attributes:
        documents: That began.
        tokens: Without padding.
        room: Tokens with padding.
    """

    documents: int = 0
    tokens: int = 0
    room: int = 0

    def plus(self, more: "Progress") -> "Progress":
        """Both together."""
        return Progress(
            documents=self.documents + more.documents,
            tokens=self.tokens + more.tokens,
            room=self.room + more.room,
        )

    def times(self, number: int) -> "Progress":
        """So many times as much."""
        return Progress(
            documents=self.documents * number, tokens=self.tokens * number, room=self.room * number
        )


def with_progress(items: Iterable[tuple[Item, int]], description: str, total: int) -> Iterator[Item]:
    """The items, with a bar once they have taken two seconds; a clock reading an item.

    Args:
        items: Each with the work that is done once it is there, in the unit of ``total``.
        description: What the bar says.
        total: All the work.
    """
    from rich.progress import Progress

    begin, done, bar = time.perf_counter(), 0, None
    try:
        for item, work in items:
            done += work
            if bar is None and time.perf_counter() - begin > _AFTER_SECONDS:
                bar = Progress()
                bar.start()
                bar.add_task(description, total=total)
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done)
            yield item
    finally:
        if bar is not None:
            bar.stop()

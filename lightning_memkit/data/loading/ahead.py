"""Draws from an iterator ahead in a thread, so that the consumer does not wait; keeps no item that was consumed."""

import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import TypeVar

_Item = TypeVar("_Item")
_LOOKS_UP_SECONDS = 0.1
_ENDS_SECONDS = 5.0


def ahead(items: Iterable[_Item], number: int, *, name: str = "memkit ahead") -> Generator[_Item, None, None]:
    """Yield the items, up to ``number`` of them drawn ahead by a thread, which ends when the generator is closed.

    An error of the source is raised where its item would have come. The thread competes with Python code
    elsewhere for the interpreter lock: drawing an item should mostly wait, or compute outside of Python.

    Args:
        items: the source; only the thread draws from it.
        number: how many items may be ready.
        name: the name of the thread.
    """
    # Each item travels in a list that is emptied, as in `each_in_a_list`.
    ready: queue.SimpleQueue[tuple[list[_Item], BaseException | None]] = queue.SimpleQueue()
    room, is_over = threading.Semaphore(number), threading.Event()

    def draw() -> None:
        source = iter(items)
        while not is_over.is_set():
            if not room.acquire(timeout=_LOOKS_UP_SECONDS):
                continue
            try:
                ready.put(([next(source)], None))
            except BaseException as error:
                ready.put(([], error))  # raised where the items are consumed
                return

    thread = threading.Thread(target=draw, name=name, daemon=True)
    thread.start()
    try:
        while True:
            held, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            room.release()
            yield held.pop()
    finally:
        is_over.set()
        room.release()
        thread.join(_ENDS_SECONDS)  # a source that hangs must not block whoever closes the generator


def each_in_a_list(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    """Wrap each item in a list that a generator empties as it yields, so that it holds no item while it waits.

    Otherwise a batch that its user has released lives until the next one arrives, because the generator's
    frame still refers to it.
    """
    return map(_in_a_list, items)


def _in_a_list(item: _Item) -> list[_Item]:
    return [item]

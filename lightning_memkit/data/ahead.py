"""Draw from an iterator ahead, in a thread, so that whoever uses the items does not wait for them."""

import queue
import threading
from collections.abc import Generator, Iterable
from typing import TypeVar

_Item = TypeVar("_Item")
_LOOKS_UP_SECONDS = 0.1


def ahead(items: Iterable[_Item], number: int, *, name: str = "memkit ahead") -> Generator[_Item, None, None]:
    """The items, up to so many of them drawn ahead by a thread; it ends when the iterator is let go.

    An error of the source is raised where its item would have come. The thread takes turns with Python code
    elsewhere: what it draws should mostly wait, or compute outside of Python.

    Args:
        items: what is drawn from, by the thread alone.
        number: how many items may lie ready.
        name: of the thread.
    """
    # Items travel in lists that are emptied: a generator that waits holds nothing that its user has let go.
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
                ready.put(([], error))  # it is raised where the items are used
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
        thread.join()

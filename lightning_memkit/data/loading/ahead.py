"""Draw from an iterator ahead, in a thread, so that whoever uses the items does not wait for them; and hold none."""

import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import TypeVar

_Item = TypeVar("_Item")
_LOOKS_UP_SECONDS = 0.1
_ENDS_SECONDS = 5.0


def ahead(items: Iterable[_Item], number: int, *, name: str = "memkit ahead") -> Generator[_Item, None, None]:
    """The items, up to so many of them drawn ahead by a thread; it ends when the iterator is let go.

    An error of the source is raised where its item would have come. The thread takes turns with Python code
    elsewhere: what it draws should mostly wait, or compute outside of Python.

    Args:
        items: what is drawn from, by the thread alone.
        number: how many items may lie ready.
        name: of the thread.
    """
    # Items travel as `each_in_a_list` has them.
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
        thread.join(_ENDS_SECONDS)  # a source that hangs must not hang whoever gives up on it


def each_in_a_list(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    """Each item in a list, which a generator empties as it yields: while it waits it holds no item any more.

    Else a batch that its user has let go lives until the next one is asked for, and is freed while that is waited for.
    """
    return map(_in_a_list, items)


def _in_a_list(item: _Item) -> list[_Item]:
    return [item]

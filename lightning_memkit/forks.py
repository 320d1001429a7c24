"""Forks of this process whose garbage collector leaves alone what they have inherited."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def starting() -> Iterator[None]:
    """Hold the collector while forks start within it, each of which calls `leave_inherited` first; costs nothing.

    A fork has one thread of its original. Were it to collect what was garbage there already, it would run destructors
    that wait for the others: gloo's process group then waits for ever. Nor would it share the pages any more.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def leave_inherited(*, collects: bool) -> None:
    """To be called in a fork: from now on the collector sees what the fork makes itself, and nothing else.

    Args:
        collects: whether the original has its collector on, asked before it starts the fork.
    """
    gc.freeze()
    if collects:
        gc.enable()

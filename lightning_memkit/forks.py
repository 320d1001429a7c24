"""Forks of this process whose garbage collector leaves alone what they have inherited."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_collects = True  # whether the process whose fork this is had its collector on


@contextmanager
def starting() -> Iterator[None]:
    """Hold the collector while forks start within it, each of which calls `leave_inherited` first; costs nothing.

    A fork has one thread of its original. Were it to collect what was garbage there already, it would run destructors
    that wait for the others: gloo's process group then waits for ever. Nor would it share the pages any more.
    """
    global _collects
    _collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if _collects:
            gc.enable()


def leave_inherited() -> None:
    """To be called in a fork: from now on the collector sees what the fork makes itself, and nothing else."""
    gc.freeze()
    if _collects:
        gc.enable()

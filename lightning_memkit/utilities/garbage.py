"""Reference cycles, collected at the price of what a piece of work has made.

A full collection looks at every object of the process: a quarter of a second once torch, Lightning and transformers
are imported, which is as much as many a training step takes.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class _PutAside:
    """Whether objects may be put aside, and whether they are (`gc.freeze`)."""

    wanted = False  # something is made from here on whose cycles are to be collected
    may_be = False
    are = False


@contextmanager
def new_garbage() -> Iterator[None]:
    """Collect at its end what was made after the first `put_aside` within, and that alone; nothing without one.

    Where somebody else has called `gc.freeze`, the collection is a full one, which looks at what is not frozen.
    """
    _PutAside.may_be, before = True, _PutAside.may_be
    try:
        yield
    finally:
        _PutAside.may_be = before
        if _PutAside.wanted and not before:
            _PutAside.wanted = False
            gc.collect()
            _take_back()


def put_aside() -> None:
    """Objects that are there are no garbage until the end of `new_garbage`; does nothing outside of it."""
    if _PutAside.may_be and not _PutAside.wanted:
        _PutAside.wanted = True
        if not gc.get_freeze_count():
            gc.freeze()
            _PutAside.are = True


def collect_all() -> None:
    """A full collection, also of what is put aside."""
    _take_back()
    gc.collect()


def _take_back() -> None:
    if _PutAside.are:
        _PutAside.are = False
        gc.unfreeze()

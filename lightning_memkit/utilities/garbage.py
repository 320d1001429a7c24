"""Collect the reference cycles that a piece of work has made, without looking at the rest of the process.

A full collection looks at every object there is: once torch, Lightning and transformers are imported, that takes as
long as many a training step.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class _State:
    """Of this process, whose objects the collector has in one place.

    Attributes:
        is_open: a `new_garbage` is under way.
        has_begun: within it, objects are made whose cycles are to be collected.
        is_ours: what was there before is frozen (`gc.freeze`), by `put_aside`.
    """

    is_open = False
    has_begun = False
    is_ours = False


@contextmanager
def new_garbage() -> Iterator[None]:
    """At its end collect what was made since the first `put_aside` within, and only that; nothing without one.

    If somebody else has called `gc.freeze`, everything that is not frozen is looked at, as by `gc.collect`.
    """
    is_outermost, _State.is_open = not _State.is_open, True
    try:
        yield
    finally:
        if is_outermost:
            begun, _State.is_open, _State.has_begun = _State.has_begun, False, False
            if begun:
                gc.collect()
                _unfreeze()


@contextmanager
def without_collecting() -> Iterator[None]:
    """Within the context the collector is off. Imports make hardly any garbage, and it takes a fifth of their time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def put_aside() -> None:
    """Until the end of `new_garbage`, the collector passes over all objects that exist now; no effect outside."""
    if _State.is_open and not _State.has_begun:
        _State.has_begun = True
        if not gc.get_freeze_count():
            gc.freeze()
            _State.is_ours = True


def collect_all() -> None:
    """A full collection, also of what is put aside."""
    _unfreeze()
    gc.collect()


def keep_aside() -> None:
    """In a fork: what the original has put aside stays so, and no `new_garbage` is under way."""
    _State.is_open = _State.has_begun = _State.is_ours = False


def _unfreeze() -> None:
    """Let the collector look again at what is put aside."""
    if _State.is_ours:
        _State.is_ours = False
        gc.unfreeze()

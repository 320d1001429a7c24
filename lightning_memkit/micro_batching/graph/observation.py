"""Whether micro-batches are weighed by what their own loss shows; paused only to measure what that costs."""

from collections.abc import Iterator
from contextlib import contextmanager


class _Observation:
    """Of the whole process: the steps that are measured may run in another thread."""

    is_paused = False


def is_paused() -> bool:
    """Whether micro-batches are weighed by what is counted in them beforehand, and no loss's graph is read."""
    return _Observation.is_paused


@contextmanager
def paused() -> Iterator[None]:
    """Within it no loss's graph is read. For measurements: what is counted beforehand need not be what weighs."""
    before, _Observation.is_paused = _Observation.is_paused, True
    try:
        yield
    finally:
        _Observation.is_paused = before

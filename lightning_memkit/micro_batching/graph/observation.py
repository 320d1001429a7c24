"""Switches off, for benchmarks only, reading the autograd graph of each loss to weigh its micro-batch."""

from collections.abc import Iterator
from contextlib import contextmanager


class _Observation:
    """Process-wide, not thread-local: the measured steps may run in another thread."""

    is_paused = False


def is_paused() -> bool:
    """Whether micro-batches are weighed by counts of their inputs, and no loss's graph is read."""
    return _Observation.is_paused


@contextmanager
def paused() -> Iterator[None]:
    """A context in which no loss's graph is read; for benchmarks, since weights may then be wrong."""
    before, _Observation.is_paused = _Observation.is_paused, True
    try:
        yield
    finally:
        _Observation.is_paused = before

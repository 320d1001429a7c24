"""Whether activation checkpointing computes again what a forward had, where autograd does not see it."""

_running = 0  # operators of a tape, one within another


def begin() -> None:
    """An operator runs again; `end` has to follow."""
    global _running
    _running += 1


def end() -> None:
    """It has run."""
    global _running
    _running -= 1


def is_running() -> bool:
    """Whether one is running."""
    return _running > 0

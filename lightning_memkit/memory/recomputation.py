"""Whether activation checkpointing is recomputing operators where autograd does not show it."""

_running = 0  # nested operators of a tape that are running


def begin() -> None:
    """Note that an operator is being recomputed; `end` must follow."""
    global _running
    _running += 1


def end() -> None:
    """Note that its recomputation has ended."""
    global _running
    _running -= 1


def is_running() -> bool:
    """Whether an operator is being recomputed."""
    return _running > 0

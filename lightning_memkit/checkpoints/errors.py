"""The error of a checkpoint that can't be written or read."""


class CheckpointError(ValueError):
    """A checkpoint is refused: the message says what is wrong with it, and what to do; nothing of it was run."""

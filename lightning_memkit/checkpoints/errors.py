"""The error of a checkpoint that can't be written or read."""


class CheckpointError(ValueError):
    """A checkpoint is refused: the message gives the reason and the remedy; nothing in it was executed."""

"""The results of trials: the values of a step, and its failures."""

from dataclasses import dataclass
from typing import Any

from lightning_memkit.micro_batching.shares.foreseen import ForeseenWronglyError


class PassedOverError(ForeseenWronglyError):
    """training_step returned None on a rank whose backward the others wait for: all ranks end the trial."""


class StepFailedError(Exception):
    """The user's step raised on the rows of a trial, or returned None for them (`skipped`)."""

    def __init__(self, cause: Exception, *, skipped: bool) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.skipped = skipped  # it returned None, by which a step skips a batch


@dataclass(kw_only=True)
class TrialValues:
    """What a step logs, and returns besides its loss.

    Attributes:
        drew: whether it drew random numbers from torch's generators.
        drew_elsewhere: whether it drew some from Python's or NumPy's.
    """

    logged: list[dict[str, Any]]
    returned: dict[str, Any]
    drew: bool
    drew_elsewhere: bool

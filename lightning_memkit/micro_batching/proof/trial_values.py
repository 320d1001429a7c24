"""What trials come to: values of a step, and how it may fail."""

from dataclasses import dataclass
from typing import Any

from lightning_memkit.micro_batching.shares.foreseen import ForeseenWronglyError


class PassedOverError(ForeseenWronglyError):
    """training_step returned None on a rank whose backward the others wait for: the trial ends on all of them."""


class StepFailedError(Exception):
    """The user's step raised on a batch that it was given for a trial."""

    def __init__(self, cause: Exception, *, skipped: bool) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.skipped = skipped  # it returned None, as it may to skip a batch


@dataclass(kw_only=True)
class TrialValues:
    """What a step logs, and returns beside its loss.

    Attributes:
        drew: whether it drew random numbers of torch.
        drew_elsewhere: whether it drew some of Python or NumPy.
    """

    logged: list[dict[str, Any]]
    returned: dict[str, Any]
    drew: bool
    drew_elsewhere: bool

"""The results of trials: the values of a step, and its failures."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

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
    """What a step logs and returns.

    Attributes:
        drew: whether it drew random numbers from torch's generators.
        drew_elsewhere: whether it drew some from Python's or NumPy's.
    """

    loss: Tensor
    logged: list[dict[str, Any]]
    returned: dict[str, Any]
    drew: bool
    drew_elsewhere: bool

    @classmethod
    def of(
        cls, loss: Tensor, logged: list[dict[str, Any]], returned: dict[str, Any], drawn: tuple[bool, bool]
    ) -> "TrialValues":
        """Those of a forward, with `Generators.drawn_from` after it."""
        drew, elsewhere = drawn
        return cls(
            loss=loss.detach(), logged=list(logged), returned=returned, drew=drew, drew_elsewhere=elsewhere
        )

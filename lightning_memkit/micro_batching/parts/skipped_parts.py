"""Find out what a whole batch's loss is if `training_step` returns None for some micro-batches and not for others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_memkit.micro_batching.parts.attempt import Attempt, BatchRun
from lightning_memkit.micro_batching.parts.cut import Cut
from lightning_memkit.micro_batching.parts.loss_rounding import difference
from lightning_memkit.micro_batching.parts.partition import Partition
from lightning_memkit.micro_batching.run import Step
from lightning_memkit.micro_batching.shares.foreseen import (
    PartSkippedError,
    WholeSkippedError,
    WholeTermsError,
)

_ROUNDED = 1e-4  # of counts, relative
# From the divisors of a loss's terms to their weights, None if these are unknown.
Weigh = Callable[[Sequence[float]], Sequence[float] | None]


@dataclass(frozen=True, kw_only=True)
class WholeLook:
    """What a forward of the whole batch has shown.

    Attributes:
        loss: None if the step returned None.
        counts: what the terms of its loss count; None where their rules are unknown.
        drew: random numbers were drawn, so that the loss's value can't be compared.
        logged: what it has logged.
        returned: what it has returned besides the loss.
        left: what it has left in the attributes and lists that a step changes.
        weighed: the sum of the loss's terms, each times its weight; None if the weights or their values are unknown.
    """

    loss: Tensor | None
    counts: Sequence[float] | None = None
    drew: bool = False
    logged: list[dict[str, Any]] = field(default_factory=list)
    returned: Mapping[str, Any] = field(default_factory=dict)
    left: Mapping[str, Any] = field(default_factory=dict)
    weighed: Tensor | None = None


class LooksAtWhole(Protocol):
    """Runs the whole batch, and its micro-batches, without a trace and without a backward."""

    @property
    def has_lost_batch(self) -> bool:
        """Whether the batch at hand is no longer as it was given, and can't be put back."""
        ...

    def __call__(self, step: Step, partition: Partition, weigh: Weigh | None = None) -> WholeLook | None:
        """What the whole batch has shown, `weigh` having its divisors; None if it does not fit, or fails."""
        ...

    def with_equal_draws(self, step: Step, partition: Partition, cut: Cut) -> list[Tensor] | None:
        """The losses of the batch and of each micro-batch, with the same random numbers; None if that fails."""
        ...


def check_skipped(batch: BatchRun, attempt: Attempt, partition: Partition, look: LooksAtWhole | None) -> bool:
    """Check that the micro-batches with a loss are what the whole batch's loss is of; False if that is unknown.

    A micro-batch without a labelled row counts nothing: then no look at the whole batch is needed where labels
    foretell what its loss counts. A guard against losses that are not finite, or spikes, is decided by the whole.

    Raises:
        WholeSkippedError: the step returns None for the whole batch.
        PartSkippedError: rows for which it returned None count in the whole batch's loss.
    """
    counted = None if batch.shares is None else batch.shares.counted
    foretold, rules = partition.combination.foretold, partition.combination.rules
    means = [] if rules is None or counted is None else list(rules.means)
    if counted is not None and means:
        told = [foretold.total(index, batch.step.batch) for index in means]
        if all(total is not None and _close(total, counted[i]) for i, total in zip(means, told, strict=True)):
            return True
    ran = set(attempt.parts)
    if batch.shares is None and not any(
        weight for index, weight in enumerate(batch.weights) if index not in ran
    ):
        return True
    try:
        whole = None if look is None else look(batch.step, partition)
    except WholeTermsError as error:
        raise PartSkippedError(str(error)) from None
    if whole is None:
        return False
    if whole.loss is None:
        raise WholeSkippedError("training_step returns None for the whole batch")
    if means and counted is not None and whole.counts is not None:
        agrees = all(_close(whole.counts[index], counted[index]) for index in means)
    elif whole.drew:
        return False
    else:
        summands = _weighed(attempt, summed=batch.shares is not None)
        agrees = not difference(batch.step, whole.loss, torch.stack(summands).sum(), summands)
    if not agrees:
        raise PartSkippedError("it returns None for some micro-batches whose rows count in the whole batch")
    return True


def _weighed(attempt: Attempt, *, summed: bool) -> list[Tensor]:
    """The losses of the micro-batches that have one, weighted; those of a loss without divisors as they are."""
    weights = [1.0] * len(attempt.losses) if summed else attempt.weights
    return [loss.double().reshape(()) * weight for loss, weight in zip(attempt.losses, weights, strict=True)]


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= _ROUNDED * max(abs(a), abs(b))

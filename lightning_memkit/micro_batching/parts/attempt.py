"""A batch that is being run in micro-batches, and what one try at it has come to."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.micro_batching import joined
from lightning_memkit.micro_batching.parts.part_values import GivenValues, PartValues
from lightning_memkit.micro_batching.parts.partition import Cut, Partition
from lightning_memkit.micro_batching.run import Step
from lightning_memkit.micro_batching.shares.step_shares import StepShares


@dataclass(kw_only=True)
class Window:
    """Batches that are accumulated into one step, weighed exactly: what each has counted so far."""

    reference: float = 0.0
    counted: float = 0.0
    totals: list[float] | None = None  # of the terms that a graph shows: the first batch's
    # Of each mean, and whether a constant stands beside it (see `StepShares`).
    fractions: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)

    @property
    def factor(self) -> float:
        """What gradients at the first batch's scale are multiplied with, once all batches have run."""
        return self.reference / self.counted if self.counted else 1.0


@dataclass(kw_only=True)
class Attempt(GivenValues):
    """What one try at a batch has come to."""

    losses: list[Tensor] = field(default_factory=list)
    contributions: list[Tensor | None] = field(default_factory=list)  # of terms of unlike shares, to the loss
    rest: Tensor | None = None  # of the batch's loss, beside them


@dataclass(kw_only=True)
class BatchRun:
    """A batch that is being run in parts.

    Args:
        step: its step.
        cut: its parts.
        weights: what each weighs, where this is known before they run; else by `shares`.
        shares: weighs each by its own loss.
    """

    step: Step
    cut: Cut
    weights: list[float]
    shares: StepShares | None


def summed_up(before: list[float], own: list[float]) -> list[float]:
    """Numbers of a window so far, with a batch's added."""
    return [a + b for a, b in zip(before or [0.0] * len(own), own, strict=True)]


def put_together(attempt: Attempt) -> Tensor | None:
    """The batch's loss from what each part's terms add to it; None where they all weigh alike, or can't be told."""
    told = [value for value in attempt.contributions if value is not None]
    if not told or len(told) < len(attempt.contributions):
        return None
    return sum(told, start=torch.zeros_like(told[0]) if attempt.rest is None else attempt.rest)


def names_of_the_loss(attempt: Attempt) -> set[tuple[str, str]]:
    """Hooks and names of what was logged and is in every part the very number that it has as a loss."""
    if not attempt.losses or len(attempt.logged) != len(attempt.losses):
        return set()
    seen, other = set[tuple[str, str]](), set[tuple[str, str]]()
    for (_, entries), loss in zip(attempt.logged, attempt.losses, strict=True):
        for entry in entries:
            (seen if same_number(loss, entry["value"]) else other).add((entry["fx"], entry["name"]))
    return seen - other


def same_number(loss: Tensor, value: Any) -> bool:
    """Whether a value is the loss itself; a mean over nothing is nan."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        return False
    return bool(value == loss) or bool(value.isnan() & loss.isnan())


def reported(
    step: Step, attempt: Attempt, partition: Partition, values: PartValues
) -> tuple[Tensor | None, dict[str, Any]]:
    """The batch's loss, what the step returned of it, and its logged values, which are counted now."""
    whole = put_together(attempt)
    total = sum(attempt.weights)
    summed = partition.summed or (partition.rules is not None and partition.rules.summed)
    shares = [weight / total for weight in attempt.weights] if total and not summed else None
    shares = shares or attempt.weights
    loss = whole
    if whole is None and attempt.losses:
        first, *_ = attempt.losses  # a number, of one dimension perhaps: none of its entries is a row
        loss = joined([one.reshape(()) for one in attempt.losses], shares, attempt.sizes).reshape(first.shape)
    # Numbers of an accelerator are not compared where rules will do: that waits for it.
    is_compared = whole is not None or (loss is not None and loss.device.type == "cpu")
    known = names_of_the_loss(attempt) if is_compared else set[tuple[str, str]]()
    entries, extra = values.of_batch(step, attempt, shares, known)
    for entry in entries:
        if loss is not None and (entry["fx"], entry["name"]) in known:
            entry = {**entry, "value": loss.to(entry["value"]).reshape_as(entry["value"])}
        step.run.log_now(entry)
    if loss is None:
        return None, {}
    if whole is not None:  # a loss that is returned under another name, too
        extra = {
            key: whole if all(map(same_number, attempt.losses, (e[key] for e in attempt.extras))) else value
            for key, value in extra.items()
        }
    if partition.state is not None and len(attempt.logged) > 1:
        partition.state.take(loss)
    return loss, extra

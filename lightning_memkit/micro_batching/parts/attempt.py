"""A batch that is being run in micro-batches, what one attempt at it has come to, and what is reported of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.micro_batching import joined
from lightning_memkit.micro_batching.graph.term_rules import Law
from lightning_memkit.micro_batching.parts.cut import Cut
from lightning_memkit.micro_batching.parts.loss_names import same_number
from lightning_memkit.micro_batching.parts.part_values import GivenValues, PartValues
from lightning_memkit.micro_batching.parts.partition import Partition
from lightning_memkit.micro_batching.run import Step
from lightning_memkit.micro_batching.shares.step_shares import StepShares


@dataclass(kw_only=True)
class Attempt(GivenValues):
    """What one attempt at a batch has come to.

    Attributes:
        losses: of the micro-batches, detached.
        contributions: what each micro-batch's terms add to the batch's loss, where terms weigh unlike.
        rest: the part of the batch's loss that has no gradient.
    """

    losses: list[Tensor] = field(default_factory=list)
    contributions: list[Tensor | None] = field(default_factory=list)
    rest: Tensor | None = None
    _weighed_by: tuple[StepShares, float] | None = None

    def take(self, shares: StepShares, factor: float) -> None:
        """Note what the micro-batches add to the batch's loss, at its scale.

        Args:
            shares: what has weighed them.
            factor: what gradients were multiplied with once all had run.
        """
        self.contributions = [None if one is None else one * factor for one in shares.contributions]
        self._weighed_by = shares, factor

    def shares_of_rank(self, divisors: Sequence[float]) -> list[float] | None:
        """What this rank's batch, run whole, weighs in the loss over all ranks' batches, by term; None if unknown.

        Args:
            divisors: those of its loss's terms.
        """
        if self._weighed_by is None:
            return None
        shares, factor = self._weighed_by
        rules, totals = shares.rules, shares.totals
        if rules.means and (totals is None or any(divisors[i] and not totals[i] for i in rules.means)):
            return None
        counts = [own - rule.excess for own, rule in zip(divisors, rules.rules, strict=True)]
        main = 1.0 if shares.shared is None else shares.shared
        weights = rules.shares(counts, totals or counts, main, ranks=shares.ranks)
        scaled = (Law.MEAN, Law.SHARED) if shares.shared is not None else (Law.MEAN,)
        of_terms = zip(rules.rules, weights, strict=True)
        return [weight * factor if rule.law in scaled else weight for rule, weight in of_terms]


@dataclass(kw_only=True)
class BatchRun:
    """A batch that is being run in micro-batches.

    Args:
        step: its step.
        cut: its micro-batches.
        weights: what each weighs, where `shares` is None.
        shares: weighs each by its own loss while it runs.
    """

    step: Step
    cut: Cut
    weights: list[float]
    shares: StepShares | None


def put_together(attempt: Attempt) -> Tensor | None:
    """The batch's loss, summed over its terms; None where all terms weigh alike, or their values are unknown."""
    told = [value for value in attempt.contributions if value is not None]
    if not told or len(told) < max(len(attempt.contributions), len(attempt.losses)):
        return None
    return sum(told, start=torch.zeros_like(told[0]) if attempt.rest is None else attempt.rest)


def equal_to_the_loss(attempt: Attempt) -> set[tuple[str, str]]:
    """Hooks and names of values that every micro-batch logs, and that equal its loss in each."""
    if not attempt.losses or len(attempt.logged) != len(attempt.losses):
        return set()
    found, other = list[set[tuple[str, str]]](), set[tuple[str, str]]()
    for (_, entries), loss in zip(attempt.logged, attempt.losses, strict=True):
        found.append({(entry["fx"], entry["name"]) for entry in entries})
        other |= {(e["fx"], e["name"]) for e in entries if not same_number(loss, e["value"])}
    return set.intersection(*found) - other


def returned_as_the_loss(attempt: Attempt) -> set[str]:
    """Names of values that are returned of every micro-batch, and that equal its loss in each."""
    names = list(attempt.extras[0]) if attempt.extras else []
    pairs = list(zip(attempt.losses, attempt.extras, strict=True))
    return {name for name in names if all(same_number(loss, one.get(name)) for loss, one in pairs)}


def shares_of(attempt: Attempt, partition: Partition) -> list[float]:
    """The weights of the micro-batches that have a loss, in the batch's."""
    total = sum(attempt.weights)
    combination = partition.combination
    summed = combination.summed or (combination.rules is not None and combination.rules.summed)
    return [weight / total for weight in attempt.weights] if total and not summed else attempt.weights


def loss_of(attempt: Attempt, partition: Partition) -> Tensor | None:
    """The batch's loss, from those of its micro-batches; None if none has one."""
    whole = put_together(attempt)
    if whole is not None or not attempt.losses:
        return whole
    first, *_ = attempt.losses  # one number, perhaps of shape (1,): it must not be joined as a row
    numbers = [one.reshape(()) for one in attempt.losses]
    return joined(numbers, shares_of(attempt, partition), attempt.sizes).reshape(first.shape)


def reported(
    step: Step, attempt: Attempt, partition: Partition, values: PartValues
) -> tuple[Tensor | None, dict[str, Any]]:
    """Log the batch's joined values; return its loss, and what the step returned besides the loss."""
    whole, combination = put_together(attempt), partition.combination
    shares, loss = shares_of(attempt, partition), loss_of(attempt, partition)
    # Comparing numbers on an accelerator would wait for it: not if the rules of `values` are enough.
    is_compared = whole is not None or (loss is not None and loss.device.type == "cpu")
    known = equal_to_the_loss(attempt) if is_compared else set[tuple[str, str]]()
    # Of a loss that is put together from its terms; a number that is that loss is put together with it.
    is_loss = set[str]() if whole is None else returned_as_the_loss(attempt)
    entries, extra = values.of_batch(step, attempt, shares, known, is_loss)
    for entry in entries:
        if loss is not None and (entry["fx"], entry["name"]) in values.logs.losses:
            entry = {**entry, "value": loss.to(entry["value"]).reshape_as(entry["value"])}
        step.run.log_now(entry)
    if loss is None:
        return None, {}
    extra = {key: whole if key in values.returned.losses else value for key, value in extra.items()}
    if combination.state is not None and len(attempt.logged) > 1:
        combination.state.take(loss)
    return loss, extra

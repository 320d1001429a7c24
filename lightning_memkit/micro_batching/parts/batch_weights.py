"""Decide what each micro-batch of a batch weighs, and scale gradients where that is known only at the batch's end."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_memkit.micro_batching import normalized
from lightning_memkit.micro_batching.graph import observation
from lightning_memkit.micro_batching.graph.origins import Origin
from lightning_memkit.micro_batching.parts.cut import Cut
from lightning_memkit.micro_batching.parts.origins_of_ranks import OriginsOfRanks
from lightning_memkit.micro_batching.parts.partition import Partition
from lightning_memkit.micro_batching.parts.scaled_gradients import scale
from lightning_memkit.micro_batching.ranks.agreement import Ranks, any_rank, sum_of_ranks
from lightning_memkit.micro_batching.run import Run, Step
from lightning_memkit.micro_batching.shares.divisors import BatchSums
from lightning_memkit.micro_batching.shares.foreseen import (
    GradientsOutliveError,
    MistakenTotalsError,
    UnknownTotalsError,
)
from lightning_memkit.micro_batching.shares.step_shares import StepShares

_UNTOLD_IN_WINDOW = (
    "MemoryBudget does not know yet what the loss is a mean over: nothing in the rows that were compared counts, or "
    "the batch has no loss, or its gradients are not finite. Until a batch tells, the loader batches of "
    "effective_batch_size weigh by labels or rows, which is not exact for a mean over some rows only. To be exact, "
    "let the loader's batches be of effective_batch_size."
)


class Surveyed(NamedTuple):
    """What the terms of a batch's loss count.

    Attributes:
        counts: of each term, in all rows.
        least: what the step clamps the divisor of each term to, where the batch counts less; else 0.
    """

    counts: list[float]
    least: list[float]

    @property
    def divisors(self) -> list[float]:
        """What the step divides each term of the whole batch by."""
        return largest(self.counts, self.least)


# Reads what a batch's terms count off forwards that leave no trace: `Surveys`.
Survey = Callable[[Step, Cut], Surveyed]


@dataclass(kw_only=True)
class Window:
    """Batches that are accumulated into one step and weighed as one: what each has counted so far.

    Attributes:
        reference: what gradients have been divided by so far: the first batch's count.
        counted: the sum of all batches' counts.
        totals: by term of the loss, what the first batch counts.
        least: by term, what the step clamps the divisor to (see `Surveyed`).
        fractions: how much of each mean has been accumulated (see `StepShares`).
        beside: whether a constant stands beside a mean (see `StepShares`).
        before: tensors with gradients of earlier steps, and these.
        origins: of the means (see `SameTerms`).
    """

    reference: float = 0.0
    counted: float = 0.0
    totals: list[float] | None = None
    least: list[float] = field(default_factory=list)
    fractions: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    before: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    origins: dict[int, Origin] = field(default_factory=dict)

    @property
    def factor(self) -> float:
        """What gradients at the first batch's scale are multiplied with, once all batches have run."""
        return self.reference / self.counted if self.counted else 1.0


class BatchWeights:
    """Weighs the micro-batches of each batch of a run.

    Three sources: each micro-batch's own loss, if its graph shows its divisors (`Combination.rules`); else 1 for a
    loss that is a sum (`Combination.summed`), or the counts that `Combination.weigh` reads off the micro-batches.
    Where totals are known before the batch runs, gradients have the right scale at once. Otherwise they are relative
    to the first micro-batch (or to the first batch of a window), and `finish` multiplies them once.

    Args:
        run: the loop.
        partition: how the batch is split, and how its loss comes from the micro-batches'.
        exact_window: weigh the batches of an accumulation window by what they count (`effective_batch_size`).

    Attributes:
        ranks: sums counts over ranks.
        survey: reads a batch's totals before it runs.
        outlive: gradients of earlier steps stay, which what mends a batch's scale must leave alone.
    """

    def __init__(self, run: Run, partition: Partition, *, exact_window: bool) -> None:
        self.ranks = Ranks()
        self.survey: Survey | None = None
        self.outlive = False
        self._run, self._partition = run, partition
        self._has_exact_windows = exact_window
        self._window, self._has_warned = Window(), False
        self._origins = OriginsOfRanks(run)
        self._told = list[float | None]()  # by term, what it counts in the batch at hand, as far as predicted

    @property
    def exact_window(self) -> bool:
        """Whether several batches are weighed as one; a window of one batch is that batch."""
        return self._has_exact_windows and self._run.batches_a_step > 1

    def begin(self, step: Step) -> None:
        """A batch begins; with it perhaps a window."""
        if self.exact_window and step.starts_window:
            self._window = Window()

    def zeroed(self, step: Step) -> None:
        """Note the gradients that a window begins with, once zero_grad has run."""
        if self.outlive and self.exact_window and step.starts_window:
            leaves = [p for p in self._run.module.parameters() if p.grad is not None]
            self._window.before = [(p, p.grad.clone()) for p in leaves if p.grad is not None]

    @property
    def _is_observed(self) -> bool:
        """Whether micro-batches are weighed by what their own losses show."""
        return self._partition.combination.rules is not None and not observation.is_paused()

    def _is_weighed(self, cut: Cut) -> bool:
        """Whether that is so for a batch: one that runs whole weighs 1, unless it is one of several."""
        return self._is_observed and (len(cut.parts) > 1 or self.exact_window or self._run.world_size > 1)

    def of(self, step: Step) -> tuple[Cut, list[float]]:
        """The micro-batches of the step's batch, and the weight of each, relative to all ranks' batches."""
        partition, combination = self._partition, self._partition.combination
        # A batch that runs whole and by itself weighs 1; there may be nothing in it that `weigh` could count. Where it
        # is unknown how a loss splits, ranks' batches weigh alike, as without micro-batches.
        is_alone = bool(partition.misfit) and self._run.world_size == 1
        is_even = (is_alone or combination.untold) and not self.exact_window
        even = partition.whole or is_even or combination.summed or self._is_observed
        cuts: list[Cut] = []
        counts: list[float] = []

        def count() -> list[float]:
            cuts.append(partition.cut(step.batch))
            counts.extend(1.0 if even else float(combination.weigh(part)) for part in cuts[0].parts)
            if combination.rules is not None and self._is_weighed(cuts[0]):
                # For `shares`, which reduces over ranks: here all of them learn if memory runs out on one.
                terms, foretold = range(len(combination.rules.rules)), combination.foretold
                self._told = [foretold.total(term, step.batch) for term in terms]
            return [sum(counts)]

        # Gradients are averaged over ranks, and weights are relative to what all ranks count together.
        total = self.ranks.totals(count)[0] / self._run.world_size
        if combination.summed or self._is_observed:
            return cuts[0], counts
        if self.exact_window:
            if (combination.untold or partition.held) and not self._has_warned:
                self._has_warned = True
                warnings.warn(_UNTOLD_IN_WINDOW, stacklevel=2)
            self._window.reference = self._window.reference or total
            self._window.counted += total
            if total == 0:  # other batches of the window may count something
                return cuts[0], [0.0] * len(counts)
            total = self._window.reference
        return cuts[0], normalized(counts, total=total)

    def shares(self, step: Step, cut: Cut) -> StepShares | None:
        """What weighs each micro-batch by its own loss; None where weights are known from `of`.

        Raises:
            UnknownTotalsError: totals are needed before the batch runs, and are not known.
        """
        shares = self._shares(step, cut)
        if shares is not None and self.exact_window:
            shares.same.origins = dict(self._window.origins)
        return shares

    def _shares(self, step: Step, cut: Cut) -> StepShares | None:
        if not self._is_weighed(cut):
            return None
        partition, rules, ranks = self._partition, self._partition.combination.rules, self._run.world_size
        assert rules is not None
        goes_on = self.exact_window and not step.starts_window
        told = self._told
        is_told = all(told[index] is not None for index in rules.means)
        if self.exact_window and not all(told[index] for index in rules.means):
            is_told = False
        begins = partition.surveys(step.batch_idx, is_told=is_told) and not goes_on
        surveys = partition.looks_up(step.batch_idx) or begins
        if ranks > 1 and (rules.means or rules.looked_up):  # all ranks need one reference
            surveys = any_rank(self._run, surveys or not (is_told or goes_on))
        if surveys and self.survey is not None:
            own = self.survey(step, cut)
            if self.exact_window:
                self._window.least = largest(self._window.least or own.least, own.least)
            return StepShares(
                rules,
                self._window.totals if goes_on else self._scales(own.divisors),
                is_known=not goes_on,
                looked_up=own.counts if self.exact_window else own.divisors,
                by_itself=ranks == 1 and not self.exact_window,
                ranks=ranks,
            )
        if goes_on:
            return StepShares(rules, self._window.totals, ranks=ranks)
        if is_told:
            totals = self._averaged([total or 0.0 for total in told])
            return StepShares(rules, totals, is_known=True, ranks=ranks)
        if step.run.batches_a_step > 1 and rules.means and not self.exact_window:
            raise UnknownTotalsError  # other batches' gradients are there already: no factor could mend these alone
        if self.outlive and rules.means:
            raise GradientsOutliveError
        return StepShares(rules, None)

    def _scales(self, divisors: list[float]) -> list[float]:
        """What micro-batches are scaled by; of a window whose first batch counts nothing, any number does."""
        return [divisor or 1.0 for divisor in divisors] if self.exact_window else divisors

    def finish(self, step: Step, shares: StepShares | None) -> float:
        """Check what the micro-batches counted against the totals that they were weighed by; mend the scale.

        Returns:
            What this batch's gradients were multiplied with; 1 within a window, which is scaled at its end.

        Raises:
            MistakenTotalsError: one factor can't mend the scale.
            UnforeseenLossError: a mean comes from another head on another rank.
        """
        if shares is None:
            if self.exact_window and step.ends_window:
                scale(parameters_of(step), self._window.factor, self._window.before)
            return 1.0
        if not shares.rules.means:
            return 1.0
        counted, foretold = shares.counted, self._partition.combination.foretold
        origins = shares.same.origins
        sums = shares.sums()._replace(origins=self._origins.numbers(shares.rules, origins))
        overall = sums.averaged(self._averaged)
        self._origins.check(shares.rules, origins, overall.origins)
        if self.exact_window:
            self._finish_batch_of_window(step, shares, overall)
            return 1.0
        try:
            factor = shares.factor(overall)
        except MistakenTotalsError:
            foretold.forget_wrong(step.batch, counted)
            raise
        if factor == 1.0:
            return factor
        foretold.forget_wrong(step.batch, counted)
        if self._run.batches_a_step > 1 or self.outlive:
            raise MistakenTotalsError
        scale(parameters_of(step), factor)
        return factor

    def _finish_batch_of_window(self, step: Step, shares: StepShares, overall: BatchSums) -> None:
        """Add up what the batches of a window have counted; after the last one mend their scale."""
        window, main = self._window, shares.rules.means[0]
        window.totals, window.origins = shares.totals, shares.same.origins
        window.counted += shares.counted_of(overall)[main]
        window.fractions = _added(window.fractions, overall.fractions)
        window.beside = _added(window.beside, overall.beside)
        if step.ends_window and window.totals is not None:
            if window.least:  # the window's own divisor is clamped, where its batches count less together
                window.counted = max(window.counted, window.least[main], key=abs)
            window.reference = window.totals[main]
            shares.refuse_constants(window.fractions, window.beside, window.factor)
            scale(parameters_of(step), window.factor, window.before)

    def _averaged(self, totals: Sequence[float]) -> list[float]:
        """Totals over all ranks, divided by their number, as gradients are."""
        return [total / self._run.world_size for total in sum_of_ranks(self._run, totals)]


def parameters_of(step: Step) -> Iterator[torch.nn.Parameter]:
    """All that the step's optimizer changes."""
    for group in step.optimizer.param_groups:
        yield from group["params"]


def largest(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Of each two numbers the one that is farther from zero."""
    return [max(pair, key=abs) for pair in zip(one, other, strict=True)]


def _added(before: list[float], own: list[float]) -> list[float]:
    return [a + b for a, b in zip(before or [0.0] * len(own), own, strict=True)]

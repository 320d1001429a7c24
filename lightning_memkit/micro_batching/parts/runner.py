"""Run one training batch in parts: weigh, move, step, accumulate, log once."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.micro_batching import batch_size, normalized, split_batch
from lightning_memkit.micro_batching.graph import observation
from lightning_memkit.micro_batching.graph.term_rules import UnseenValueError
from lightning_memkit.micro_batching.graph.term_values import TermValues
from lightning_memkit.micro_batching.parts.attempt import (
    Attempt,
    BatchRun,
    Window,
    put_together,
    reported,
    summed_up,
)
from lightning_memkit.micro_batching.parts.part_values import PartValues
from lightning_memkit.micro_batching.parts.partition import Cut, Partition
from lightning_memkit.micro_batching.ranks.agreement import Ranks, any_rank, sum_of_ranks
from lightning_memkit.micro_batching.run import Run, Step
from lightning_memkit.micro_batching.shares.divisors import BatchSums
from lightning_memkit.micro_batching.shares.foreseen import (
    MistakenTotalsError,
    NothingCountedError,
    UnknownTotalsError,
)
from lightning_memkit.micro_batching.shares.step_shares import StepShares

_UNTOLD_REST = (
    "The loss holds a number without a gradient of which it can't be told how those of parts make the batch's: it is "
    "no mean over rows, nor one over what a term of the loss counts, nor a sum, or it stands beside a mean over "
    "nothing. The loss that is reported of a batch in parts is not the whole batch's to the digit; gradients are. Log "
    "that number by itself."
)
_UNTOLD_TERMS = (
    "The terms of the loss weigh unlike in the parts of a batch, and what each adds to it is computed within a "
    "function that does not show it. The loss that is reported of a batch in parts is not the whole batch's to the "
    "digit; gradients are. Log the terms by themselves."
)


# Reads off forwards without a backward, and without a trace, what a batch counts: `Surveys`.
Survey = Callable[[Step, Cut], list[float]]


class PartsRunner:
    """Runs a `Step` in parts with the full batch's result.

    Args:
        run: the loop whose step it is.
        partition: how to split; its `micro_batch_size` shrinks after an OOM.
        exact_window: weigh the batches of an accumulation window by what they hold (`effective_batch_size`).
    """

    def __init__(
        self,
        run: Run,
        partition: Partition,
        *,
        exact_window: bool,
    ) -> None:
        self.partition = partition
        self.unsplittable = ""  # why the loss can't be split, where that is known and nothing is split yet
        self.phase = ""  # what runs, for those who say what failed
        self.values = PartValues()
        self.ranks = Ranks()
        self.survey: Survey | None = None
        self._warned = set[str]()
        self._run = run
        self._has_exact_windows = exact_window
        self._window = Window()

    @property
    def _exact_window(self) -> bool:
        """Whether several batches are weighed as one; a window of one batch is that batch."""
        return self._has_exact_windows and self._run.batches_a_step > 1

    def run(self, step: Step) -> tuple[Tensor | None, dict[str, Any]]:
        """Forward, zero_grad and backward of the step's batch, in parts; gradients are the full batch's.

        Raises:
            UnforeseenLossError: its loss is another one than was proven to add up; gradients are not complete.
            UnknownTotalsError: it has to begin again, with totals that are known; gradients are not complete.
        """
        attempt = Attempt()
        self._attempt(step, attempt)
        self.phase = "after backward, in hooks, clipping or the optimizer's step"
        return reported(step, attempt, self.partition, self.values)

    def run_again(self, step: Step) -> None:
        """Only for the gradients: nothing is logged or counted a second time."""
        undo = [step.keep_counters(), self._run.keep_results()]
        try:
            self._attempt(step, Attempt())
        finally:
            for put_back in undo:
                put_back()

    def _attempt(self, step: Step, attempt: Attempt) -> None:
        if self._exact_window and step.starts_window:
            self._window = Window()
        self.phase = "in splitting and weighing the batch"
        cut, weights = self._weighed(step.batch)
        attempt.cut, attempt.split = cut, self.partition.split
        # A batch that runs whole weighs what it weighs, unless it is one of several.
        observed = self._is_observed and (
            len(cut.parts) > 1 or self._exact_window or self._run.world_size > 1
        )
        shares = self._shares(step, cut) if observed else None
        batch = BatchRun(step=step, cut=cut, weights=weights, shares=shares)
        kept = self._kept(batch)
        self.ranks.attempt(lambda: self._run_parts(batch, attempt, kept), ends_window=step.ends_window)
        if shares is not None:
            factor = self._finish_batch(step, shares)
            attempt.contributions = [None if c is None else c * factor for c in shares.contributions]
            attempt.rest = self._rest(shares)
            if shares.was_unlike and put_together(attempt) is None:
                self._warn(_UNTOLD_TERMS)
            if attempt.losses and shares.totals is None and shares.rules.means and not self._exact_window:
                raise NothingCountedError  # a mean over nothing, whose gradient and loss are still the batch's
        elif self._exact_window and step.ends_window:
            self._finish_window(step)
        if attempt.losses:
            step.after_backward()

    def _rest(self, shares: StepShares) -> Tensor | None:
        """What has no gradient in the batch's loss."""
        rests = self.partition.rests
        if rests is None or not shares.rests or rests.pieces != len(shares.rests[0].pieces):
            return None
        rest = rests.joined(shares.rests)
        if rests.untold:
            self._warn(_UNTOLD_REST)
        return rest

    def _warn(self, words: str) -> None:
        """Warn once a fit of what is reported otherwise."""
        if words not in self._warned:
            self._warned.add(words)
            warnings.warn(words, stacklevel=2)

    @property
    def _is_observed(self) -> bool:
        """Whether parts are weighed by what their own losses show."""
        return self.partition.rules is not None and not observation.is_paused()

    def _weighed(self, batch: Any) -> "tuple[Cut, list[float]]":
        """The parts of a batch, and the share of each in what the loss is a mean over, over all ranks."""
        partition, cuts, counts = self.partition, [], []

        def count() -> list[float]:
            cuts.append(partition.cut(batch))
            even = partition.whole or partition.summed or self._is_observed
            counts.extend(1.0 if even else float(partition.weigh(part)) for part in cuts[0].parts)
            return [sum(counts)]

        # Gradients are averaged over ranks; shares are of what all ranks hold together.
        total = self.ranks.totals(count)[0] / self._run.world_size
        if partition.summed or self._is_observed:
            return cuts[0], counts
        if self._exact_window:
            self._window.reference = self._window.reference or total
            self._window.counted += total
            if total == 0:  # the window's other batches may hold some
                return cuts[0], [0.0] * len(counts)
            total = self._window.reference
        return cuts[0], normalized(counts, total=total)

    def _shares(self, step: Step, cut: Cut) -> StepShares:
        """What weighs the parts of a batch while they run: against totals that are known, foretold, or the first's."""
        partition, rules, ranks = self.partition, self.partition.rules, self._run.world_size
        assert rules is not None
        goes_on = self._exact_window and not step.starts_window
        told = [partition.foretold.total(index, step.batch) for index in range(len(rules.rules))]
        is_told = all(told[index] is not None for index in rules.means)
        if self._exact_window and not all(told[index] for index in rules.means):
            is_told = False
        surveys = partition.looks_up(step.batch_idx) or (
            not goes_on and (partition.surveyed or partition.counts_nothing == step.batch_idx)
        )
        if ranks > 1 and (rules.means or rules.looked_up):  # all ranks need one reference
            surveys = any_rank(self._run, surveys or not (is_told or goes_on))
        if surveys and self.survey is not None:
            self.phase = "in reading what the loss counts"
            own = self.survey(step, cut)
            return StepShares(
                rules,
                self._window.totals if goes_on else own,
                is_known=not goes_on,
                looked_up=own,
                by_itself=ranks == 1 and not self._exact_window,
                ranks=ranks,
            )
        if goes_on:
            return StepShares(rules, self._window.totals, ranks=ranks)
        if is_told:
            totals = self._averaged([total or 0.0 for total in told])
            return StepShares(rules, totals, is_known=True, ranks=ranks)
        if step.run.batches_a_step > 1 and rules.means and not self._exact_window:
            raise UnknownTotalsError  # gradients of other batches are there: they can't be brought to scale later
        return StepShares(rules, None)

    def _averaged(self, totals: Sequence[float]) -> list[float]:
        """Totals over all ranks, divided by their number, as gradients are."""
        return [total / self._run.world_size for total in sum_of_ranks(self._run, totals)]

    def _kept(self, batch: BatchRun) -> list[int | None]:
        """Which parts run: all, and as many as any rank has where ranks meet in every part; None repeats the first."""
        # Also those that count nothing for the loss: they log and return what rows of the batch do.
        parts = len(batch.weights)
        return [*range(parts), *[None] * (self.ranks.most_parts(parts) - parts)]

    def _run_parts(self, batch: BatchRun, attempt: Attempt, kept: list[int | None]) -> None:
        ran: list[int] = []  # of those that left something behind, the ones that counted
        cut, step, state = batch.cut, batch.step, self.partition.state
        if state is not None:
            state.begin()
        for position, index in enumerate(kept):
            which = f"of part {position + 1} of {len(kept)}"
            repeated = index is None
            if state is not None:
                state.begin_part()
            weight, index = 0.0 if repeated else batch.weights[index or 0], index or 0
            loss, extra, logged, weight = self.ranks.part(
                lambda index=index, weight=weight, which=which, first=position == 0: self._run_part(
                    batch, index, weight, which, first=first
                ),
                counts=weight > 0,
                last=position == len(kept) - 1 and step.ends_window,
                smallest=lambda: self._run_smallest(step),
            )
            if repeated:
                continue
            if state is not None:
                state.end_part()
            attempt.logged.append((weight, logged))
            attempt.parts_logged.append(index)
            if loss is not None:
                attempt.weights.append(weight)
                attempt.losses.append(loss)
                attempt.extras.append(cut.as_wide_as_the_batch(index, extra))
                attempt.parts.append(index)
                attempt.sizes.append(cut.sizes[index])
                ran.append(len(attempt.logged) - 1)
            del loss, extra
        attempt.rows = cut.rows(attempt.parts)
        if state is not None:
            sizes = [float(size) for size in attempt.sizes]
            state.finish({"loss": attempt.weights, "samples": sizes}, ran)

    def _run_part(
        self, batch: BatchRun, index: int, weight: float, which: str, *, first: bool
    ) -> tuple[Tensor | None, dict[str, Any], list[dict[str, Any]], float]:
        """Transfer, forward and backward of one part: its detached loss, what it returned and logged, its weight."""
        self.phase = f"in forward {which}"
        step = batch.step
        part = self._run.transfer(batch.cut.parts[index])
        watched = batch.shares is not None and (
            self.partition.unlike
            or (self.partition.rests is not None and self.partition.rests.seen)
            or (self._run.world_size > 1 and bool(batch.shares.rules.means))
        )
        with self._run.logging_held() as logged:
            with TermValues() if watched else nullcontext() as noted:
                loss, extra = step.forward(part)
            if first:
                step.zero_grad()
            if loss is None:
                return None, extra, logged, weight
            self.phase = f"in backward {which}"
            if batch.shares is not None and weight > 0:
                scaled, weight = self._observed(batch, loss, index, None if noted is None else noted.values)
            else:
                scaled = self._scaled(step, loss, weight)
            if scaled is not None:
                step.backward(scaled)
        return loss.detach(), extra, logged, weight

    def _observed(
        self, batch: BatchRun, loss: Tensor, index: int, values: dict[tuple[Any, int], Tensor] | None
    ) -> tuple[Tensor | None, float]:
        """What a part's backward starts from by what its loss itself shows, and what it counts."""
        shares = batch.shares
        assert shares is not None
        rows = batch.cut.sizes[index] / max(sum(batch.cut.sizes), 1)
        over = 1 if self._exact_window else self._run.batches_a_step
        try:
            scaled, weight = shares.scaled(
                loss, rows, over, values, self.partition.foretold, batch.cut.parts[index]
            )
        except UnseenValueError:
            self.partition.unlike = True  # from now on the terms' values are noted
            raise MistakenTotalsError from None
        if shares.was_unlike and not self.partition.unlike:
            self.partition.unlike = True
            if self._run.world_size == 1:
                raise MistakenTotalsError
        if scaled is None and self.ranks.uncounted != "skip":
            scaled = shares.nothing(loss)
        return scaled, weight

    def _run_smallest(self, step: Step) -> None:
        """Forward and backward of one row, which count for nothing."""
        rows = 1 if self.partition.whole else batch_size(step.batch)
        part = step.batch
        if rows > 1:
            part = split_batch(step.batch, [1, rows - 1], split=self.partition.split)[0]
        with self._run.logging_held():
            loss, _ = step.forward(self._run.transfer(part))
            if loss is not None:
                step.quiet_backward(loss * 0)

    def _scaled(self, step: Step, loss: Tensor, weight: float) -> Tensor | None:
        """What backward starts from; of a part that does not count what other ranks need of it."""
        if weight > 0:
            return loss * (weight if self._exact_window else weight / self._run.batches_a_step)
        if self.ranks.uncounted == "backward":
            return loss * 0
        if self.ranks.uncounted == "skip":
            return None
        # Its loss may be nan (a mean over nothing).
        return torch.stack([p.sum() * 0 for p in _parameters(step) if p.requires_grad]).sum()

    def _finish_batch(self, step: Step, shares: StepShares) -> float:
        """Check what parts counted against the totals that they were weighed by; mend the scale, and return by what.

        Raises:
            MistakenTotalsError: the scale can't be mended any more.
        """
        if not shares.rules.means:
            return 1.0
        counted = shares.counted
        overall = shares.sums().averaged(self._averaged)
        if self._exact_window:
            self._finish_batch_of_window(step, shares, overall)
            return 1.0
        try:
            factor = shares.factor(overall)
        except MistakenTotalsError:
            self.partition.foretold.forget_wrong(step.batch, counted)
            raise
        if factor == 1.0:
            return factor
        self.partition.foretold.forget_wrong(step.batch, counted)
        if self._run.batches_a_step > 1:
            raise MistakenTotalsError
        self._scale(step, factor)
        return factor

    def _finish_batch_of_window(self, step: Step, shares: StepShares, overall: BatchSums) -> None:
        """Add up what batches that are weighed as one have had; after the last one mend their scale."""
        window, main = self._window, shares.rules.means[0]
        window.totals = shares.totals
        window.counted += shares.counted_of(overall)[main]
        window.fractions = summed_up(window.fractions, overall.fractions)
        window.beside = summed_up(window.beside, overall.beside)
        if step.ends_window and window.totals is not None:
            window.reference = window.totals[main]
            shares.refuse_constants(window.fractions, window.beside, window.factor)
            self._finish_window(step)

    def _finish_window(self, step: Step) -> None:
        """Bring the window's gradients from the first batch's scale to the whole window's."""
        self._scale(step, self._window.factor)

    def _scale(self, step: Step, factor: float) -> None:
        gradients = [parameter.grad for parameter in _parameters(step) if parameter.grad is not None]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)


def _parameters(step: Step) -> Iterator[torch.nn.Parameter]:
    for group in step.optimizer.param_groups:
        yield from group["params"]

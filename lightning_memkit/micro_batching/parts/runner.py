"""Run one training batch in micro-batches: transfer, forward, backward, accumulate, report once."""

import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.micro_batching import batch_size, split_batch
from lightning_memkit.micro_batching.changes.step_watch import StepWatch
from lightning_memkit.micro_batching.graph.loss_head import chooses, head_of
from lightning_memkit.micro_batching.graph.term_rules import UnseenValueError
from lightning_memkit.micro_batching.graph.term_values import TermValues
from lightning_memkit.micro_batching.parts import untold
from lightning_memkit.micro_batching.parts.attempt import Attempt, BatchRun, put_together, reported
from lightning_memkit.micro_batching.parts.batch_weights import BatchWeights, Survey, parameters_of
from lightning_memkit.micro_batching.parts.before_zero_grad import BeforeZeroGrad
from lightning_memkit.micro_batching.parts.equal_draws import EqualDraws
from lightning_memkit.micro_batching.parts.module_chunks import ModuleChunks
from lightning_memkit.micro_batching.parts.once_a_batch import OnceABatch
from lightning_memkit.micro_batching.parts.part_values import PartValues
from lightning_memkit.micro_batching.parts.partition import Partition
from lightning_memkit.micro_batching.parts.skipped_parts import check_skipped
from lightning_memkit.micro_batching.parts.watched_parts import WatchedParts
from lightning_memkit.micro_batching.parts.whole_comparison import WholeComparison
from lightning_memkit.micro_batching.ranks.agreement import Ranks
from lightning_memkit.micro_batching.run import Run, Step
from lightning_memkit.micro_batching.shares.foreseen import (
    MistakenTotalsError,
    NewFunctionsError,
    NothingCountedError,
    UnforeseenLossError,
)
from lightning_memkit.micro_batching.shares.step_shares import StepShares


class PartsRunner:
    """Runs a `Step` in micro-batches with the whole batch's result.

    Args:
        run: the loop whose step it is.
        partition: how to split.
        watch: knows what state trials have seen steps change.
        exact_window: weigh the batches of an accumulation window by what they count (`effective_batch_size`).

    Attributes:
        phase: what is running, for messages about a failure.
        values: combines what micro-batches log and return.
        ranks: coordinates the ranks in each step.
        draws: gives each micro-batch the numbers that the batch would draw from Python's and NumPy's generators.
        whole: compares with the whole batch, also where the step returned None for some of its micro-batches.
        chunks: the modules that run in chunks where batches run whole, or a row does not fit.
    """

    def __init__(self, run: Run, partition: Partition, watch: StepWatch, *, exact_window: bool) -> None:
        self.partition, self.phase = partition, ""
        self.values = PartValues()
        self.ranks = Ranks()
        self.draws: EqualDraws = EqualDraws(run.module)
        self.watch = watch
        self._watched = WatchedParts(run, watch)
        self._hooks = BeforeZeroGrad(run, watch)
        self._once = OnceABatch(run)
        self._compares = False  # the functions of the next loss: of a batch's first, see `chooses`
        self.whole, self.chunks = WholeComparison(None), ModuleChunks(run)
        self._weights = BatchWeights(run, partition, exact_window=exact_window)
        self._run, self._warned = run, set[str]()

    def connect(self, ranks: Ranks, survey: Survey) -> None:
        """Let ranks take their steps together, and totals be read before a batch runs."""
        self.ranks = self._weights.ranks = self._watched.ranks = ranks
        self._weights.survey = survey

    def gradients_outlive(self, outlive: bool) -> None:
        """Say whether gradients of earlier steps stay when a batch begins."""
        self._weights.outlive = outlive

    def run(self, step: Step) -> tuple[Tensor | None, dict[str, Any]]:
        """Forward, zero_grad and backward of the step's batch in micro-batches; gradients are the whole batch's.

        Raises:
            UnforeseenLossError: the loss differs from the one that was proven to add up; gradients are incomplete.
            UnknownTotalsError: the batch has to begin again with known totals; gradients are incomplete.
            ManyRowsError, ManyRowsStateError: the whole batch has another loss, or leaves other rows.
        """
        self._attempt(step, attempt := Attempt(), compares=True)
        return reported(step, attempt, self.partition, self.values)

    def run_again(self, step: Step) -> None:
        """Run the batch for its gradients only: nothing is logged or counted a second time."""
        undo = [step.keep_counters(), self._run.keep_results()]
        try:
            self._attempt(step, Attempt(), compares=False)
        finally:
            for put_back in undo:
                put_back()

    def _attempt(self, step: Step, attempt: Attempt, *, compares: bool) -> None:
        self.chunks.resize(self.partition.chunk_rows, self.partition.chunk_tokens)
        self._weights.begin(step)
        self.phase = "in splitting and weighing the batch"
        attempt.cut, own = self._weights.of(step)
        attempt.split = self.partition.split
        shares = self._weights.shares(step, attempt.cut)
        batch = BatchRun(step=step, cut=attempt.cut, weights=own, shares=shares)
        # All, as each logs values of its rows; None repeats the first, as ranks need it.
        kept = [*range(len(own)), *[None] * (self.ranks.most_parts(len(own)) - len(own))]
        with self._once.held(several=len(kept) > 1) as finish:
            self.ranks.attempt(lambda: self._run_parts(batch, attempt, kept), ends_window=step.ends_window)
            self.ranks.completed(lambda: self._complete(batch, attempt, compares=compares))
            finish()
        if attempt.losses:
            step.after_backward()

    def _complete(self, batch: BatchRun, attempt: Attempt, *, compares: bool) -> None:
        self._finish(batch, attempt)
        self.phase = "after backward, in hooks, clipping or the optimizer's step"
        self._once.begin_part(counts=False)
        if compares:  # before hooks, which may change weights
            self.whole.compare(batch.step, attempt, self.partition, self.values)

    def _finish(self, batch: BatchRun, attempt: Attempt) -> None:
        """Bring gradients and what the micro-batches' losses have shown to the scale of the batch."""
        weights, shares = self._weights, batch.shares
        factor = weights.finish(batch.step, shares)
        if shares is not None:
            attempt.take(shares, factor)
            attempt.rest = self._rest(shares)
            if shares.was_unlike and put_together(attempt) is None:
                self._warn(untold.TERMS)
            if attempt.losses and shares.totals is None and shares.rules.means and not weights.exact_window:
                raise NothingCountedError  # a mean over nothing, whose gradient and loss are still the batch's

    def _rest(self, shares: StepShares) -> Tensor | None:
        """The part of the batch's loss that has no gradient."""
        rests = self.partition.combination.rests
        if rests is None or not shares.rests or rests.pieces != len(shares.rests[0].pieces):
            return None
        if rests.untold:
            self._warn(untold.REST)
        return rests.joined(shares.rests)

    def _warn(self, words: str) -> None:
        """Warn once a fit that a reported value is not exactly the whole batch's."""
        if words not in self._warned:
            self._warned.add(words)
            warnings.warn(words, stacklevel=2)

    def _run_parts(self, batch: BatchRun, attempt: Attempt, kept: list[int | None]) -> None:
        ran: list[int] = []  # which entries of `attempt.logged` are of micro-batches with a loss
        cut, step, state, is_split = batch.cut, batch.step, self.partition.combination.state, len(kept) > 1
        if state is not None:
            state.begin()
        if is_split:
            self.draws.begin()
            self._watched.begin()
        self._compares = is_split
        for position, index in enumerate(kept):
            which = f"of micro-batch {position + 1} of {len(kept)}"
            repeated = index is None
            self._once.begin_part(counts=not repeated)
            if state is not None:
                state.begin_part()
            weight, index = 0.0 if repeated else batch.weights[index or 0], index or 0
            loss, extra, logged, weight = self.ranks.part(
                lambda index=index, weight=weight, which=which, position=position: self._run_watched(
                    batch, index, weight, which, position=position, of=len(kept)
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
        skips = len(attempt.parts_logged) > max(len(attempt.parts), 1)
        if skips and not check_skipped(batch, attempt, self.partition, self.whole.looks):
            self._warn(untold.SKIP)
        if state is not None:
            sizes = [float(size) for size in attempt.sizes]
            failed = state.finish({"loss": attempt.weights, "samples": sizes}, ran, attempt.losses)
            if names := self._watched.unsettled(state, failed):
                self._warn(untold.STATE.format(names=names))

    def _run_watched(
        self, batch: BatchRun, index: int, weight: float, which: str, *, position: int, of: int
    ) -> tuple[Tensor | None, dict[str, Any], list[dict[str, Any]], float]:
        """Run one micro-batch; of several, each draws what the batch would draw, and changes what trials have seen."""
        if of > 1:
            self.draws.begin_part()
        result = self._run_part(batch, index, weight, which, first=position == 0)
        if of > 1:
            self.draws.end_part(looks=position in (0, of - 1))  # the last shows what those between have drawn
        self._watched.check(position, of)
        return result

    def _run_part(
        self, batch: BatchRun, index: int, weight: float, which: str, *, first: bool
    ) -> tuple[Tensor | None, dict[str, Any], list[dict[str, Any]], float]:
        """Transfer, forward and backward; returns the detached loss, what the step returned and logged, the weight."""
        self.phase = f"in forward {which}"
        step, rests = batch.step, self.partition.combination.rests
        part = self._run.transfer(batch.cut.parts[index])
        watched = batch.shares is not None and (
            self.partition.notes_values
            or (rests is not None and rests.seen)
            or (self._run.world_size > 1 and bool(batch.shares.rules.means))
        )
        with self._run.logging_held() as logged:
            with TermValues() if watched else nullcontext() as noted:
                with torch.set_grad_enabled(not self.partition.skipped), self._hooks.next_forward():
                    loss, extra = step.forward(part)
            if self.partition.skipped and loss is not None:
                raise UnforeseenLossError(
                    "the step returned None for the whole batch in a trial, and not now"
                )
            if first:
                self._hooks.zero(step, several=len(batch.cut.parts) > 1)
                self._weights.zeroed(step)
            if loss is None:
                return None, extra, logged, weight
            if self._compares:
                self._compare_functions(loss)
            self.phase = f"in backward {which}"
            if batch.shares is not None and weight > 0:
                scaled, weight = self._observed(batch, loss, index, None if noted is None else noted.values)
            else:
                scaled = self._scaled(step, loss, weight)
            if scaled is not None:
                step.backward(scaled)
        return loss.detach(), extra, logged, weight

    def _compare_functions(self, loss: Tensor) -> None:
        """Check that the loss is computed by functions whose results were compared.

        Raises:
            NewFunctionsError: it is not.
        """
        known = self.partition.combination.head
        self._compares = known is not None and chooses(known)
        new = frozenset[tuple[str, str]]() if known is None else head_of(loss) - known - self.chunks.heads
        if new:
            raise NewFunctionsError(edges=new)

    def _observed(
        self, batch: BatchRun, loss: Tensor, index: int, values: dict[tuple[Any, int], Tensor] | None
    ) -> tuple[Tensor | None, float]:
        """The loss that backward starts from, weighed by what it shows itself; and what the micro-batch counts."""
        shares = batch.shares
        assert shares is not None
        rows = batch.cut.sizes[index] / max(sum(batch.cut.sizes), 1)
        over = 1 if self._weights.exact_window else self._run.batches_a_step
        try:
            foretold = self.partition.combination.foretold
            scaled, weight = shares.scaled(loss, rows, over, values, foretold, batch.cut.parts[index])
        except UnseenValueError:
            self.partition.note_values(in_window=self._weights.exact_window)
            raise MistakenTotalsError from None
        if shares.was_unlike and not self.partition.unlike:
            self.partition.note_values()
            if self._run.world_size == 1:
                raise MistakenTotalsError
        if scaled is None and self.ranks.uncounted != "skip":
            scaled = shares.nothing(loss)
        return scaled, weight

    def _run_smallest(self, step: Step) -> None:
        """Forward and backward of one row with weight zero, so that no rank waits."""
        rows = 1 if self.partition.keeps_whole else batch_size(step.batch)
        parts = (
            split_batch(step.batch, [1, rows - 1], split=self.partition.split) if rows > 1 else [step.batch]
        )
        with self._run.logging_held():
            loss, _ = step.forward(self._run.transfer(parts[0]))
            if loss is not None:
                step.quiet_backward(loss * 0)

    def _scaled(self, step: Step, loss: Tensor, weight: float) -> Tensor | None:
        """The loss that backward starts from; of weight zero it is what other ranks need to go on."""
        if weight > 0:
            return loss * (weight if self._weights.exact_window else weight / self._run.batches_a_step)
        if self.ranks.uncounted == "backward":
            return loss * 0
        if self.ranks.uncounted == "skip":
            return None
        # Its loss may be nan (a mean over nothing), which times zero is nan: start from the parameters instead.
        return torch.stack([p.sum() * 0 for p in parameters_of(step) if p.requires_grad]).sum()

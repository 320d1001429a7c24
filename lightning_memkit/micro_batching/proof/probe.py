"""Prove that a batch may be split: by its loss's graph, and by gradients of some rows whole and in micro-batches."""

import warnings
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching import WeighBy, Weigher, batch_size, split_batch, weigher
from lightning_memkit.micro_batching.changes.composed_state import ComposedState, with_earlier
from lightning_memkit.micro_batching.graph.loss_head import Edges
from lightning_memkit.micro_batching.graph.loss_rules import LossRules
from lightning_memkit.micro_batching.graph.rests import RestRules
from lightning_memkit.micro_batching.parts.cut import Splitter
from lightning_memkit.micro_batching.parts.logged_values import LoggedValues
from lightning_memkit.micro_batching.parts.partition import Combination
from lightning_memkit.micro_batching.parts.returned_values import ReturnedValues
from lightning_memkit.micro_batching.proof import probed_rows, row_runs, verdicts
from lightning_memkit.micro_batching.proof.decomposability import Verdict
from lightning_memkit.micro_batching.proof.judged import OpenWays, changes_verdict, mismatch_verdict
from lightning_memkit.micro_batching.proof.learning import learn_counts, learn_values
from lightning_memkit.micro_batching.proof.novelty import Novelties, is_revised_after
from lightning_memkit.micro_batching.proof.row_runs import ComparisonOutcome, RowRuns, Rows
from lightning_memkit.micro_batching.proof.row_trials import RowTrials
from lightning_memkit.micro_batching.proof.trial_values import StepFailedError
from lightning_memkit.micro_batching.proof.trials import Trials
from lightning_memkit.micro_batching.proof.without_noise import LEVELS, quiet
from lightning_memkit.micro_batching.ranks.agreement import any_rank, largest_of_ranks
from lightning_memkit.micro_batching.run import Step
from lightning_memkit.micro_batching.shares.batch_counts import Foretelling
from lightning_memkit.micro_batching.shares.foreseen import ForeseenWronglyError

# Rows of one batch may be too alike to show that they act on each other, or to tell candidates apart.
_PROBED_BATCHES = 3
_MOST_PROBES = 24  # in a run in which every batch holds something new
_PLACES = 3  # in the batch, where rows are looked for that count in the loss


class Weighing:
    """How micro-batches are weighed: by the divisors that each loss shows, as the user says, or as gradients confirm.

    A loss whose graph shows its divisors is weighed by these, in every micro-batch. For others, candidates of
    `weigh_by` are compared; those that gradients can't tell apart stay open until a batch tells them apart.

    Args:
        weigh_by: the user's choice; `"auto"` compares all candidates.
        split: the user's own splitter.

    Attributes:
        verdict: whether micro-batches add up; None where this is unknown.
        rules: how the loss's terms add up, where its graph shows it.
        foretold: which numbers of a batch predict each rule's divisor; dropped once it predicts wrongly.
        unlike: terms of the loss weigh unlike in a micro-batch.
        rests: how the parts of the loss without a gradient combine, with `rules`.
        state: attributes and lists that the step changes, where micro-batches leave them as the batch would.
        logs, returned: how logged and returned values come from those of micro-batches.
        unproven: why nothing could be proven; empty where it was.
        probes: how many comparisons were made.
        fewest: the fewest rows that the step runs on, as far as known.
        skipped: the batch at hand tells nothing: it has no loss as a whole, nothing in it counts, or it is not finite.
        head: the functions next to the losses that were compared, see `head_of`.
        has_more: the batch has more rows than any before; or more or less of what the step may divide by.
    """

    def __init__(self, weigh_by: WeighBy | Weigher, split: Splitter | None) -> None:
        self.weigh_by: WeighBy | Weigher = weigh_by
        self.split = split
        self.verdict: Verdict | None = None
        self.rules: LossRules | None = None
        self.foretold = Foretelling()
        self.rests: RestRules | None = None
        self.state: ComposedState | None = None
        self.logs, self.returned = LoggedValues(), ReturnedValues()
        self.unlike, self.unproven, self.skipped = False, "", False
        self.probes, self.fewest = 0, 1
        self.head: Edges = frozenset()
        self.has_more = False
        self._ways = OpenWays(given=weigh_by)
        self._smallest = 0  # rows of the smallest micro-batch that was compared
        self._is_mixed = False  # two micro-batches were compared that both count something
        self._batches, self._novelties = 0, Novelties()
        self._is_new = False  # the batch at hand has something that no batch before it had
        self._is_untold = False  # a term was seen of which no rows have told how it adds up

    @property
    def proven(self) -> bool:
        """Whether enough has been seen of the loss to split a batch that fits whole."""
        probes = _PROBED_BATCHES if self.rules is not None else self.probes
        enough = min(self._batches, probes) >= _PROBED_BATCHES
        holds = self.verdict is not None and self.verdict.adds_up and self._is_mixed
        return enough and holds and not self.skipped

    def settle(self, step: Step, trials: Trials, micro_batch_size: int) -> None:
        """Probe the batch if it needs it; afterwards `weigh_by` and `rules` hold for it."""
        self.skipped, self._batches = self._is_untold, self._batches + 1
        self._ways = self._ways.at(step.batch)
        splits = self.rules is None and self.verdict is not None and self.verdict.adds_up
        splits = splits and 0 < micro_batch_size < batch_size(step.batch)
        wanted = self._wanted(step, micro_batch_size)
        is_new = self._is_new and not self._novelties.only_classes
        divides, novel = self.rules is not None and self.rules.has_own_numbers, self._novelties
        has_more = novel.is_larger or (divides and novel.has_counts)
        told = [wanted, is_new, splits, self._ways.without_labels, has_more]
        wanted, is_new, splits, unlabelled, self.has_more = map(bool, largest_of_ranks(step.run, told))
        self._ways = self._ways.by_rows() if unlabelled else self._ways
        self.weigh_by = self._ways.chosen(self.weigh_by)
        if not wanted and not (splits and self._ways.is_new):
            return
        is_first = self.probes == 0
        # Once a size is chosen, a probe compares no more rows: it must not need more memory than training.
        self._probe(step, trials, probed_rows.PROBED_SAMPLES[0] if is_first else micro_batch_size)
        if is_first or self._is_untold or is_new:
            self._contradict(step, trials)

    def _contradict(self, step: Step, trials: Trials) -> None:
        """Compare pairs of rows that are most unlike, or equal in an id: among more rows their effect may drown."""
        if not self.probes or self.verdict is None or not self.verdict.adds_up:
            return
        total = -int(largest_of_ranks(step.run, [-batch_size(step.batch)])[0])
        if self.fewest > 1 or total <= 2 or not trials.ranks.compares:
            return
        known, places = dict(vars(self)), [one for one in probed_rows.few_rows(step.batch) if one[0] < total]
        most = int(largest_of_ranks(step.run, [len(places)])[0])
        for rows, place in [*places, *places[-1:] * (most - len(places))]:
            trials.limited = rows > probed_rows.PROBED_SAMPLES[-1]
            with suppress(row_runs.NothingCountsError, StepFailedError):
                probed = self._rows_of(step, trials, rows, place, alone=True)
                self._settled_by(step, trials, replace(probed, is_further=True), is_last=True)
            verdict = self.verdict
            if any_rank(step.run, verdict is None or not verdict.may_be_rounding):
                return
            # A few rows prove no more than five did: what they show is dropped, but for names of terms.
            if self.rules is not None and known["rules"] is not None:
                known["rules"] = known["rules"].named_as_in(self.rules)
            vars(self).update(known)

    def again(self, step: Step, trials: Trials, micro_batch_size: int) -> None:
        """Probe this batch, whose loss was not the one that was proven."""
        ways, self._is_new = self._ways.at(step.batch).anew(), True
        self._ways = ways.by_rows() if any_rank(step.run, ways.without_labels) else ways
        self._probe(step, trials, micro_batch_size)
        self._contradict(step, trials)

    def combination(self, batch: Any) -> Combination:
        """How a batch's loss comes from its micro-batches', as far as known."""
        return Combination(
            weigh=weigher(self.weigh_by, batch),
            summed=self.weigh_by == "sum",
            rules=self.rules,
            foretold=self.foretold,
            rests=self.rests,
            state=self.state,
            head=self.head or None,
            untold=self._ways.given == "auto" and not (self.verdict.adds_up if self.verdict else self.probes),
        )

    def refuse(self, verdict: Verdict) -> None:
        """Don't split batches any more."""
        self.rules, self.verdict = None, verdict

    def _wanted(self, step: Step, micro_batch_size: int) -> bool:
        new = self._is_new = self._novelties.are_in(step.batch)
        if new:
            self.foretold.distrust()
        if self._novelties.has_sums:
            self.foretold.look_again()
        if self.verdict is not None and not self.verdict.adds_up:
            return False
        if self.probes == 0:
            return not self.unproven or new
        if not 0 < micro_batch_size < batch_size(step.batch) or self.probes >= _MOST_PROBES:
            return False
        # Losses that show their divisors, too: rules for logged values may hold by chance in one batch.
        few = self.probes < _PROBED_BATCHES or not self._is_mixed
        few = few or (micro_batch_size == 1 and self._smallest > 1)
        if new or few or self._is_untold or is_revised_after(self._batches):
            return True
        return self.rules is None and probed_rows.weigh_differently(
            self._ways.open, step.batch, micro_batch_size, self.split
        )

    def _probe(self, step: Step, trials: Trials, most: int) -> None:
        """Compare as many rows as fit into memory."""
        self.weigh_by = self._ways.open[0]
        if not trials.ranks.compares:
            # Split as the user says, or as the batch's labels suggest.
            self.probes, self.verdict = _PROBED_BATCHES, None
            self._ways = self._ways.agreeing(self._ways.open[:1])
            reason = f"ranks reduce gradients in every backward and {trials.ranks.reason}"
            if self.weigh_by != "auto" and not callable(self.weigh_by):
                warnings.warn(verdicts.unchecked(reason, self.weigh_by), stacklevel=2)
            return
        total = -int(largest_of_ranks(step.run, [-batch_size(step.batch)])[0])
        numbers = probed_rows.numbers_of_rows(most, total, fewest=self.fewest, is_first=self.probes == 0)
        for rows in numbers:
            # The smallest comparison is not limited on the host: without one, nothing is known.
            trials.limited = rows > probed_rows.PROBED_SAMPLES[-1]
            try:
                places = _PLACES if rows < total else 1
                self._compare(step, trials, rows, places, alone=most == 1 and self.fewest == 1)
                return
            except row_runs.NothingCountsError as error:
                # A batch that is not finite tells nothing, and runs whole.
                self.skipped |= self.verdict is None or isinstance(error, row_runs.NotFiniteError)
                return
            except StepFailedError as error:
                # The step returned None for these rows, or its loss was not as predicted: they tell nothing.
                if error.skipped or isinstance(error.cause, ForeseenWronglyError):
                    self.skipped = True
                    return
                if is_out_of_memory(error.cause):
                    continue
                if self.verdict is not None and self.verdict.adds_up and rows // 2 < self._smallest:
                    self.fewest = rows // 2 + 1  # the step fails on so few rows, whatever its loss
                    return
                if step.run.world_size > 1:
                    raise error.cause from None
                self.probes += 1
                self.refuse(verdicts.fails_on_parts(error.cause))
                return
        if numbers and self.verdict is None:  # otherwise earlier batches have proven it
            self.unproven = "two samples at once run out of memory"

    def _compare(self, step: Step, trials: Trials, rows: int, places: int, *, alone: bool) -> None:
        """Compare some rows whole and in micro-batches; other rows, if too few of these count, or none."""
        for place in range(self.probes, self.probes + places):
            is_last = place == self.probes + places - 1
            probed = self._rows_of(step, trials, rows, place, alone=alone)
            try:
                if self._settled_by(step, trials, probed, is_last=is_last):
                    return
            except row_runs.NothingCountsError as error:
                self._is_untold |= isinstance(error, row_runs.UntoldTermError)
                self.skipped |= self._is_untold
                if is_last:
                    raise

    def _rows_of(self, step: Step, trials: Trials, rows: int, place: int, *, alone: bool) -> Rows:
        small = probed_rows.probed_rows(step.batch, rows, self.split, place)
        sizes = [1, rows - 1] if alone else [rows // 2, rows - rows // 2]
        if (self.probes == 0 or self._is_new) and self.split is None and step.run.world_size == 1:
            small = probed_rows.in_order_of(small, lambda row: trials.loss_of(step, row))
        if len(self._ways.open) > 1:
            small = probed_rows.told_apart(small, sizes[0], step.batch)
        return Rows(whole=small, parts=split_batch(small, sizes, split=self.split), sizes=sizes)

    def _settled_by(self, step: Step, trials: Trials, probed: Rows, *, is_last: bool) -> bool:
        """Compare these rows; True if that settles how they add up, and for the last rows in any case.

        In train mode first; with less noise where another seed shows that noise alone explains the difference.
        """
        for level in LEVELS:
            with quiet(step.run.module, level) as draws:
                runs = RowRuns(step, trials, probed, draws)
                rows = RowTrials(runs)
                reads = self._ways.given == "auto"
                outcome = rows.compare(self._ways.open, reads=reads, known=self.rules)
                self.unlike = self.unlike or outcome.unlike
                compared = [part.head for part in outcome.parts if part is not None]
                self.head = self.head.union(outcome.whole.head, *compared)
                # Ranks see different samples, and must come to one answer.
                if largest_of_ranks(step.run, [outcome.miss.excess])[0] <= 1:
                    is_mixed = not any_rank(step.run, not outcome.is_mixed)
                    if not is_mixed and not is_last:
                        return False
                    if not is_mixed and (self._is_mixed or any_rank(step.run, outcome.is_lone)):
                        raise row_runs.NothingCountsError  # earlier comparisons know more than these rows show
                    # Comparisons begin with one random state: what rows share was drawn alike in all of them.
                    drew = any_rank(step.run, level < 2 and outcome.whole.drew)
                    if drew and any_rank(step.run, runs.draw_without_rows()):
                        break
                    self._is_mixed = is_mixed
                    self._holds(step, probed, rows, outcome)
                    return True
                if not rows.noise_explains(outcome):
                    self.probes += 1
                    self.refuse(changes_verdict(step, probed, outcome) or mismatch_verdict(step, outcome))
                    return True
        self.unproven = "the loss draws random numbers of its own"
        return True

    def _holds(self, step: Step, probed: Rows, rows: RowTrials, outcome: ComparisonOutcome) -> None:
        """Keep how the micro-batches add up, unless one depends on what another left behind."""
        self.probes += 1
        self._smallest = min(self._smallest or probed.sizes[0], *probed.sizes)
        self.verdict = (
            changes_verdict(step, probed, outcome)
            or rows.dependence(outcome)
            or Verdict(adds_up=True, relative_error=outcome.miss.relative_error)
        )
        self.unproven = ""
        if outcome.rules is None or len(outcome.rules.rules) > len(self.rules.rules if self.rules else ()):
            self._is_untold = self.skipped = False
        self.rules, self.state = outcome.rules, with_earlier(outcome.state, self.state)
        if outcome.rules is not None:
            learn_counts(probed, self.foretold, outcome, outcome.rules)
        self._ways, self.weigh_by = self._ways.agreeing(outcome.ways), outcome.ways[0]
        self.rests = learn_values(
            step, probed, outcome, logs=self.logs, returned=self.returned, rests=self.rests
        )

"""Prove that a batch may be split: what its loss's graph shows, and gradients of some rows whole and in parts."""

import warnings
from contextlib import suppress

from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching import (
    WeighBy,
    Weigher,
    batch_size,
    split_batch,
)
from lightning_memkit.micro_batching.changes.composed_state import ComposedState
from lightning_memkit.micro_batching.graph.loss_rules import LossRules
from lightning_memkit.micro_batching.graph.rests import RestRules
from lightning_memkit.micro_batching.parts.joining_rules import ROUNDED
from lightning_memkit.micro_batching.parts.logged_values import LoggedValues
from lightning_memkit.micro_batching.parts.partition import Splitter
from lightning_memkit.micro_batching.parts.returned_values import ReturnedValues
from lightning_memkit.micro_batching.proof import decomposability, verdicts
from lightning_memkit.micro_batching.proof.decomposability import Verdict
from lightning_memkit.micro_batching.proof.judged import (
    candidates,
    changes_verdict,
    counts_by_way,
    mismatch_verdict,
)
from lightning_memkit.micro_batching.proof.learning import learn_counts, learn_rests
from lightning_memkit.micro_batching.proof.novelty import Novelties
from lightning_memkit.micro_batching.proof.probed_rows import (
    in_order_of,
    numbers_of_rows,
    probed_rows,
    told_apart,
    weigh_differently,
)
from lightning_memkit.micro_batching.proof.row_runs import (
    ComparisonOutcome,
    NothingCountsError,
    RowRuns,
    Rows,
)
from lightning_memkit.micro_batching.proof.row_trials import RowTrials
from lightning_memkit.micro_batching.proof.trial_values import StepFailedError
from lightning_memkit.micro_batching.proof.trials import Trials
from lightning_memkit.micro_batching.proof.without_noise import LEVELS, quiet
from lightning_memkit.micro_batching.ranks.agreement import any_rank, largest_of_ranks
from lightning_memkit.micro_batching.run import Step
from lightning_memkit.micro_batching.shares.batch_counts import Foretelling
from lightning_memkit.micro_batching.shares.foreseen import ForeseenWronglyError

_PAIR, _UNLIKE_PAIRS = 2, (1, 3, 5)  # by the first numbers of the batch that differ between its rows
_ROUNDED_PAIR = 0.01  # how noise is measured on two rows of a deep net may miss by less
_PROBED_SAMPLES = (5, 2)  # the second where the first runs out of memory
# Rows of one batch may be too alike to act on each other, or to tell ways of weighing apart.
_PROBED_BATCHES = 3
_MOST_PROBES = 24  # of a run whose every batch is new in something
_PLACES = 3  # where rows are looked for that count in the loss, of which a batch may have few


class Weighing:
    """How parts are weighed: by what each part's loss shows of itself, by what the user says, or by what fits.

    A loss whose terms show their divisors is weighed by these, in every part of every batch. What it shows nothing of
    is compared: ways of weighing that gradients can't tell apart stay open until a batch weighs differently under
    them; that batch is probed again.

    Args:
        weigh_by: the user's choice; `"auto"` considers all that a batch may mean.
        split: the user's own splitter.

    Attributes:
        verdict: whether parts add up; None where this could not be found out.
        rules: how the loss's terms add up, where its graph shows it.
        foretold: what the numbers of a batch tell of each rule's divisor, while none has told wrongly.
        unlike: the loss's terms have unlike shares.
        rests: how what has no gradient in the loss goes together, with `rules`.
        state: attributes and lists that the step changes, as far as parts compose them.
        logs: how logged values come from those of parts.
        returned: how what the step returns comes from what it returns of parts.
        unproven: why nothing could be found out; empty where it was.
        probes: how many comparisons were made.
        fewest: rows that the step runs on, as far as known.
        skipped: the batch at hand is passed over by the module itself: as a whole it has no loss.
    """

    def __init__(self, weigh_by: WeighBy | Weigher, split: Splitter | None) -> None:
        self.weigh_by: WeighBy | Weigher = weigh_by
        self.split = split
        self.verdict: Verdict | None = None
        self.rules: LossRules | None = None
        self.foretold = Foretelling()
        self.unlike = False
        self.rests: RestRules | None = None
        self.state: ComposedState | None = None
        self.logs = LoggedValues()
        self.returned = ReturnedValues()
        self.unproven = ""
        self.probes = 0
        self.fewest = 1
        self.skipped = False
        self._given: WeighBy | Weigher = weigh_by
        self._open: list[WeighBy | Weigher] = []
        self._batches = 0
        self._smallest = 0  # rows of the smallest part that was compared
        self._is_mixed = False  # parts that both count were compared
        self._novelties = Novelties()

    @property
    def proven(self) -> bool:
        """Whether enough has been seen of the loss to split a batch that fits whole."""
        enough = self._batches >= _PROBED_BATCHES and (
            self.rules is not None or self.probes >= _PROBED_BATCHES
        )
        holds = self.verdict is not None and self.verdict.adds_up and self._is_mixed
        return enough and holds and not self.skipped

    def settle(self, step: Step, trials: Trials, micro_batch_size: int) -> None:
        """Probe where the batch needs it; afterwards `weigh_by` and `rules` hold for this batch."""
        self.skipped = False
        self._batches += 1
        if self.probes == 0 and not self.unproven:
            self._open = candidates(self._given, step.batch)
        if not any_rank(step.run, self._wanted(step, micro_batch_size)):
            return
        is_first = self.probes == 0
        # Once a size is chosen, a probe keeps to it: it must not need more memory than training does.
        self._probe(step, trials, _PROBED_SAMPLES[0] if is_first else micro_batch_size)
        if is_first and self.probes and self.verdict is not None and self.verdict.adds_up:
            self._contradict(step, trials)

    def _contradict(self, step: Step, trials: Trials) -> None:
        """Compare pairs of the most unlike rows before the first batch is split: more rows may hide what these do."""
        total = -int(largest_of_ranks(step.run, [-batch_size(step.batch)])[0])
        if self.fewest > 1 or total <= _PAIR or not trials.ranks.compares:
            return
        known = dict(vars(self))
        for place in _UNLIKE_PAIRS:
            with suppress(NothingCountsError, StepFailedError):
                probed = self._rows_of(step, trials, _PAIR, place, alone=True)
                self._settled_by(step, trials, probed, is_last=True)
            verdict = self.verdict
            if verdict is None or not (verdict.adds_up or verdict.relative_error < _ROUNDED_PAIR):
                return
            # Two rows tell no more than the five did; no batch less is compared for them.
            vars(self).update(known)

    def again(self, step: Step, trials: Trials, micro_batch_size: int) -> None:
        """Probe this batch, whose loss turned out to be another one than was proven."""
        self._open = candidates(self._given, step.batch)
        self._probe(step, trials, micro_batch_size)

    def refuse(self, verdict: Verdict) -> None:
        """Batches are not split any more."""
        self.rules, self.verdict = None, verdict

    def _wanted(self, step: Step, micro_batch_size: int) -> bool:
        new = self._novelties.are_in(step.batch, values=self.rules is None)
        if self.probes == 0:
            return not self.unproven or new
        if self.verdict is not None and not self.verdict.adds_up:
            return False
        if not 0 < micro_batch_size < batch_size(step.batch) or self.probes >= _MOST_PROBES:
            return False
        # Also of a loss that shows its divisors: what is logged comes from parts by rules that may hold by chance.
        if self.probes < _PROBED_BATCHES or new or not self._is_mixed:
            return True
        if micro_batch_size == 1 and self._smallest > 1:
            return True
        return self.rules is None and weigh_differently(self._open, step.batch, micro_batch_size, self.split)

    def _probe(self, step: Step, trials: Trials, most: int) -> None:
        """Compare as many rows as run in the memory there is."""
        self.weigh_by = self._open[0]
        if not trials.ranks.compares:
            self._trusted(f"ranks reduce gradients in every backward and {trials.ranks.reason}")
            return
        # Ranks compare as many rows, each of its own batch.
        total = -int(largest_of_ranks(step.run, [-batch_size(step.batch)])[0])
        numbers = numbers_of_rows(_PROBED_SAMPLES, most, total, fewest=self.fewest)
        for rows in numbers:
            # Without a probe nothing is known: on the host the smallest may take what it needs.
            trials.limited = rows > _PROBED_SAMPLES[-1]
            try:
                places = _PLACES if rows < total else 1
                self._compare(step, trials, rows, places, alone=most == 1 and self.fewest == 1)
                return
            except NothingCountsError:  # nothing counts in this batch, or the run has diverged
                self.skipped = self.verdict is None
                return
            except StepFailedError as error:
                # Nothing is learned from a batch that the module passes over.
                if error.skipped or isinstance(error.cause, ForeseenWronglyError):
                    self.skipped = True
                    return
                if is_out_of_memory(error.cause):
                    continue
                if self.verdict is not None and self.verdict.adds_up and rows // 2 < self._smallest:
                    self.fewest = rows // 2 + 1  # it may not run on so few, which is no matter of the loss
                    return
                if step.run.world_size > 1:
                    raise error.cause from None
                self.probes += 1
                self.refuse(verdicts.fails_on_parts(error.cause))
                return
        if numbers and self.verdict is None:  # else it is known from batches before
            self.unproven = "two samples at once run out of memory"

    def _trusted(self, reason: str) -> None:
        """What can't be compared is split as the user says, or as the batch's labels suggest, with a warning."""
        self.probes, self._open, self.verdict = _PROBED_BATCHES, self._open[:1], None
        if self.weigh_by != "auto" and not callable(self.weigh_by):
            warnings.warn(
                f"MemoryBudget can't check that the loss may be split, since {reason}: it is taken to be a mean over "
                f"{self.weigh_by}. Write weigh_by= to say what it is a mean over.",
                stacklevel=2,
            )

    def _compare(self, step: Step, trials: Trials, rows: int, places: int, *, alone: bool) -> None:
        """Compare some rows whole and in parts; others, where too few of them count to tell.

        Raises:
            NothingCountsError: none counts, wherever rows were looked for.
        """
        for place in range(self.probes, self.probes + places):
            is_last = place == self.probes + places - 1
            probed = self._rows_of(step, trials, rows, place, alone=alone)
            try:
                if self._settled_by(step, trials, probed, is_last=is_last):
                    return
            except NothingCountsError:
                if is_last:
                    raise

    def _rows_of(self, step: Step, trials: Trials, rows: int, place: int, *, alone: bool) -> Rows:
        small = probed_rows(step.batch, rows, self.split, place)
        sizes = [1, rows - 1] if alone else [rows // 2, rows - rows // 2]
        if self.probes == 0 and self.split is None and step.run.world_size == 1:
            small = in_order_of(small, lambda row: trials.loss_of(step, row))
        if len(self._open) > 1:
            small = told_apart(small, sizes[0], step.batch)
        return Rows(whole=small, parts=split_batch(small, sizes, split=self.split), sizes=sizes)

    def _settled_by(self, step: Step, trials: Trials, probed: Rows, *, is_last: bool) -> bool:
        """Whether these rows have told; the last ones do in any case.

        In train mode first; with less noise where another seed shows that noise alone may be the difference.
        """
        for level in LEVELS:
            with quiet(step.run.module, level) as draws:
                rows = RowTrials(RowRuns(step, trials, probed, draws))
                outcome = rows.compare(self._open, reads=self._given == "auto", known=self.rules)
                self.unlike = self.unlike or outcome.unlike
                # Ranks see other samples, and must come to one answer.
                if largest_of_ranks(step.run, [outcome.miss.excess])[0] <= 1:
                    is_mixed = not any_rank(step.run, not outcome.is_mixed)
                    if not is_mixed and not is_last:
                        return False
                    if not is_mixed and (self._is_mixed or any_rank(step.run, outcome.is_lone)):
                        raise NothingCountsError  # more is known than these rows tell
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
        """Keep how the parts add up, unless one hands something on to the next."""
        self.probes += 1
        self._smallest = min(self._smallest or probed.sizes[0], *probed.sizes)
        self.verdict = (
            changes_verdict(step, probed, outcome)
            or rows.dependence(outcome)
            or Verdict(adds_up=True, relative_error=outcome.miss.relative_error)
        )
        self.unproven = ""
        self.rules, self.state = outcome.rules, outcome.state
        if outcome.rules is not None:
            learn_counts(probed, self.foretold, outcome, outcome.rules)
        self._open = outcome.ways
        self.weigh_by = self._open[0]
        self._learn_values(step, probed, rows, outcome)

    def _learn_values(self, step: Step, probed: Rows, rows: RowTrials, outcome: ComparisonOutcome) -> None:
        """How what is logged and returned comes from what parts log and return."""
        parts = [part for part in outcome.parts if part is not None]
        exact = step.run.precision in ("32-true", "64-true")
        allowed = decomposability.tolerance(step.run.module.parameters(), reduced=not exact)
        allowed = min(allowed, ROUNDED) if exact else allowed
        shares, sizes = outcome.present_shares, [probed.sizes[index] for index in outcome.present]
        if outcome.rules is not None:
            if self.rests is None or self.rests.pieces != len(outcome.rules.rules) + 1:
                self.rests = RestRules(len(outcome.rules.rules))
            learn_rests(probed, self.rests, outcome, allowed)
        self.logs.compare(outcome.whole.logged, [part.logged for part in parts], shares, sizes, allowed)
        self.returned.compare(
            outcome.whole.returned, [part.returned for part in parts], counts_by_way(probed, outcome), allowed
        )

"""Prove that a batch may be split: what its loss's graph shows, and gradients of some rows whole and in parts."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_memkit import decomposability
from lightning_memkit.decomposability import Verdict
from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching import (
    WeighBy,
    Weigher,
    batch_size,
    find_labels,
    normalized,
    split_batch,
    weigher,
)
from lightning_memkit.micro_batching.batch_counts import Foretold, foretelling
from lightning_memkit.micro_batching.comparison import SCALE, Comparison, Miss, spans_of
from lightning_memkit.micro_batching.composed_state import ComposedState
from lightning_memkit.micro_batching.loss_rules import VARYING_FACTOR, Law, LossRules, learned, scale_terms
from lightning_memkit.micro_batching.loss_terms import LossTerms, terms_of
from lightning_memkit.micro_batching.step_changes import StepChange
from lightning_memkit.micro_batching.without_noise import LEVELS, SharedDraws, quiet
from lightning_memkit.plugins import _seam
from lightning_memkit.plugins._checks import hooks_run_by_part
from lightning_memkit.plugins._logs import LoggedValues
from lightning_memkit.plugins._novelty import Novelties
from lightning_memkit.plugins._partition import Splitter
from lightning_memkit.plugins._probed_rows import probed_rows, told_apart
from lightning_memkit.plugins._ranks import any_rank, largest_of_ranks
from lightning_memkit.plugins._returned import ReturnedValues
from lightning_memkit.plugins._trials import StepFailedError, Trials

_LOGGED = 1e-5  # relative difference of logged values that is rounding; nothing is summed up as in gradients
_PROBED_SAMPLES = (5, 2)  # the second where the first runs out of memory
_PROBED_BATCHES = 3  # of a loss whose graph shows nothing: the samples of one may be too alike to tell
_MOST_PROBES = 24  # of a run whose every batch is new in something
_TERMS = 6  # of a loss, or groups of them, that are compared one by one
_PLACES = 3  # where rows are looked for that count in the loss, of which a batch may have few
# Batch statistics are warned about; a batch that is changed in place is handed out in copies.
_CHANGED_IN_PARTS = ("batch_statistics", "batch", "generator")
_COARSE = 1e-5  # measured noise from which on a small term could hide in a large one


class _NothingCountsError(Exception):
    """The probed rows have no gradient: of what does not count nothing is learned."""


@dataclass(kw_only=True)
class _Run:
    """One trial step: its gradient, and what its loss, its logs and its results were."""

    gradient: Tensor
    terms: LossTerms
    dtype: torch.dtype
    loss: Tensor
    logged: list[dict[str, Any]]
    returned: dict[str, Any]
    values: dict[Any, Tensor]
    left: dict[str, Any]

    @property
    def counts(self) -> bool:
        """Whether it has a gradient: not where all labels are ignored, or a mean is over nothing."""
        return bool(self.gradient.isfinite().all()) and bool(self.gradient.any())


@dataclass(kw_only=True)
class _Rows:
    """Some rows of a batch, whole and in parts."""

    whole: Any
    parts: list[Any]
    sizes: list[int]


@dataclass(kw_only=True)
class _Outcome:
    """What a comparison has come to."""

    miss: Miss
    ways: list[WeighBy | Weigher]
    rules: LossRules | None
    whole: _Run
    parts: list[_Run | None]
    shares: list[float]
    comparison: Comparison
    why: str = ""  # the graph's own word on why the loss does not split
    bends: bool = False  # gradients are changed by what is not linear in them
    is_lone: bool = False  # a sum of which one part alone counts: it may be a mean that is kept from zero
    changes: Sequence[StepChange] = ()  # what the step changes besides gradients
    state: ComposedState | None = None  # of these, what may be put together from parts

    @property
    def is_mixed(self) -> bool:
        """Whether several parts count: one alone tells little of what rows do to each other."""
        return not self.is_lone and _several(self.parts)


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
        foretold: for each rule, the numbers of a batch that its divisor was in proportion to.
        state: attributes and lists that the step changes, as far as parts compose them.
        unproven: why nothing could be found out; empty where it was.
        probes: how many comparisons were made.
        skipped: the batch at hand is passed over by the module itself: as a whole it has no loss.
    """

    def __init__(self, weigh_by: WeighBy | Weigher, split: Splitter | None) -> None:
        self.weigh_by: WeighBy | Weigher = weigh_by
        self.split = split
        self.verdict: Verdict | None = None
        self.rules: LossRules | None = None
        self.foretold: list[list[Foretold]] = []
        self.unproven = ""
        self.unlike = False  # the loss's terms have unlike shares
        self.skipped = False
        self.state: ComposedState | None = None
        self.logs = LoggedValues()
        self.returned = ReturnedValues()
        self._given: WeighBy | Weigher = weigh_by
        self._open: list[WeighBy | Weigher] = []
        self.probes = 0
        self._batches = 0
        self.fewest = 1  # rows that the step runs on, as far as known
        self._wanted_probes = _PROBED_BATCHES
        self._smallest = 0  # rows of the smallest part that was compared
        self._is_mixed = False  # parts that both count were compared
        self._novelties = Novelties()
        self._draws: SharedDraws | None = None  # hands the whole's random numbers out to its parts

    @property
    def proven(self) -> bool:
        """Whether enough has been seen of the loss to split a batch that fits whole."""
        enough = self._batches >= _PROBED_BATCHES and (
            self.rules is not None or self.probes >= _PROBED_BATCHES
        )
        holds = self.verdict is not None and self.verdict.adds_up and self._is_mixed
        return enough and holds and not self.skipped

    def settle(self, step: _seam.Step, trials: Trials, micro_batch_size: int) -> None:
        """Probe where the batch needs it; afterwards `weigh_by` and `rules` hold for this batch."""
        self.skipped = False
        self._batches += 1
        if self.probes == 0 and not self.unproven:
            self._open = _candidates(self._given, step.batch)
        if not any_rank(step.trainer, self._wanted(step, micro_batch_size)):
            return
        # Once a size is chosen, a probe keeps to it: it must not need more memory than training does.
        self._probe(step, trials, micro_batch_size if self.probes else _PROBED_SAMPLES[0])

    def again(self, step: _seam.Step, trials: Trials, micro_batch_size: int) -> None:
        """Probe this batch, whose loss turned out to be another one than was proven."""
        self._open = _candidates(self._given, step.batch)
        self._probe(step, trials, micro_batch_size)

    def refute(self, shown: str) -> None:
        """A micro-batch's loss has shown that rows act on each other."""
        self.rules = None
        self.verdict = Verdict(
            adds_up=False,
            relative_error=float("inf"),
            cause=f"the samples of a batch act on each other in the loss, which is scaled by {shown}",
            remedy="keep the batch whole (micro_batch_size = the loader's batch size; ActivationCheckpointing helps "
            "it to fit), or pass split= so that each part holds a complete group",
        )

    def _wanted(self, step: _seam.Step, micro_batch_size: int) -> bool:
        first = self.probes == 0
        new = self._novelties.are_in(step.batch, values=self.rules is None)
        if first:
            return not self.unproven or new
        if self.verdict is not None and not self.verdict.adds_up:
            return False
        if not 0 < micro_batch_size < batch_size(step.batch) or self.probes >= _MOST_PROBES:
            return False
        if self.rules is not None:
            # What is logged comes from parts by rules that one batch alone may suggest by chance.
            wanted = self.probes < self._wanted_probes or new or not self._is_mixed
            return wanted or (micro_batch_size == 1 and self._smallest > 1)
        wanted = self.probes < _PROBED_BATCHES or new or not self._is_mixed
        wanted = wanted or (micro_batch_size == 1 and self._smallest > 1)
        return wanted or (len(self._open) > 1 and self._open_ways_differ(step.batch, micro_batch_size))

    def _open_ways_differ(self, batch: Any, micro_batch_size: int) -> bool:
        total = batch_size(batch)
        sizes = [min(micro_batch_size, total)]
        sizes += [1] * (total - sizes[0])
        parts = split_batch(batch, sizes, split=self.split)
        shares = [normalized([float(weigher(way, batch)(part)) for part in parts]) for way in self._open]
        return any(abs(a - b) > 1e-12 for other in shares[1:] for a, b in zip(shares[0], other, strict=True))

    def _probe(self, step: _seam.Step, trials: Trials, most: int) -> None:
        total = batch_size(step.batch)
        self.weigh_by = self._open[0]
        if _seam.communicates_in_every_part(step.trainer):
            self._trusted(
                f"{type(step.trainer.strategy).__name__} averages gradients over ranks in each backward"
            )
            return
        least = 2 * self.fewest
        for rows in sorted(
            {min(max(min(samples, most), least), total) for samples in _PROBED_SAMPLES}, reverse=True
        ):
            if rows < least:
                return
            # Without a probe nothing is known: on the host the smallest may take what it needs.
            trials.limited = rows > _PROBED_SAMPLES[-1]
            try:
                self._compare(step, trials, rows, alone=most == 1 and self.fewest == 1)
                return
            except _NothingCountsError:  # nothing counts in this batch, or the run has diverged
                self.skipped = self.verdict is None
                return
            except StepFailedError as error:
                if error.skipped:  # nothing is learned from a batch that the module passes over
                    self.skipped = True
                    return
                if is_out_of_memory(error.cause):
                    continue
                if self.verdict is not None and self.verdict.adds_up and rows // 2 < self._smallest:
                    self.fewest = rows // 2 + 1  # it may not run on so few, which is no matter of the loss
                    return
                if step.trainer.world_size > 1:
                    raise error.cause from None
                self._fails(error.cause)
                return
        if self.verdict is None:  # else it is known from batches before
            self.unproven = "two samples at once run out of memory"

    def _fails(self, cause: Exception) -> None:
        """The whole batch may well run: a module may ask for a certain number of samples."""
        self.probes += 1
        self.rules = None
        self.verdict = Verdict(
            adds_up=False,
            relative_error=float("inf"),
            cause=f"training_step fails on a part of the batch ({type(cause).__name__}: {cause})",
            remedy="keep the batch whole (micro_batch_size = the loader's batch size), or pass split=",
        )

    def _trusted(self, reason: str) -> None:
        """What can't be compared is split as the user says, or as the batch's labels suggest, with a warning."""
        self.probes, self._open, self.verdict = _PROBED_BATCHES, self._open[:1], None
        if self.weigh_by != "auto" and not callable(self.weigh_by):
            warnings.warn(
                f"MemoryBudget can't check that the loss may be split, since {reason}: it is taken to be a mean over "
                f"{self.weigh_by}. Write weigh_by= to say what it is a mean over.",
                stacklevel=2,
            )

    def _compare(self, step: _seam.Step, trials: Trials, rows: int, *, alone: bool) -> None:
        """Compare some rows whole and in parts; others, where too few of them count to tell.

        Raises:
            _NothingCountsError: none counts, wherever rows were looked for.
        """
        places = _PLACES if rows < batch_size(step.batch) else 1
        for place in range(self.probes, self.probes + places):
            is_last = place == self.probes + places - 1
            probed = self._rows_of(step.batch, rows, place, alone=alone)
            try:
                if self._settled_by(step, trials, probed, is_last=is_last):
                    return
            except _NothingCountsError:
                if is_last:
                    raise

    def _settled_by(self, step: _seam.Step, trials: Trials, probed: _Rows, *, is_last: bool) -> bool:
        """Whether these rows have told; the last ones do in any case."""
        outcome = None
        for level in LEVELS:
            with quiet(step.trainer.lightning_module, level) as self._draws:
                outcome = self._compared(step, trials, probed)
                # Ranks see other samples, and must come to one answer.
                excess = largest_of_ranks(step.trainer, [outcome.miss.excess])[0]
                if excess <= 1:
                    is_mixed = not any_rank(step.trainer, not outcome.is_mixed)
                    if not is_mixed and not is_last:
                        return False
                    if not is_mixed and (self._is_mixed or any_rank(step.trainer, outcome.is_lone)):
                        raise _NothingCountsError  # more is known than these rows tell
                    self._is_mixed = is_mixed
                    self._holds(step, trials, probed, outcome)
                    return True
                self._hand_out(probed, None)
                other = trials.gradient_of(step, probed.whole, seed=1)
                incomplete = self._draws is not None and not self._draws.complete
                if not any_rank(step.trainer, incomplete or outcome.comparison.differs(other)):
                    break  # no random numbers are the reason
        else:
            self.unproven = "the loss draws random numbers of its own"
            return True
        assert outcome is not None
        self.probes += 1
        self.rules = None
        self.verdict = _repeated_changes(step, probed, outcome) or self._mismatch(step, outcome)
        return True

    def _rows_of(self, batch: Any, rows: int, place: int, *, alone: bool) -> _Rows:
        small = probed_rows(batch, rows, self.split, place)
        sizes = [1, rows - 1] if alone else [rows // 2, rows - rows // 2]
        if len(self._open) > 1:
            small = told_apart(small, sizes[0], batch)
        return _Rows(whole=small, parts=split_batch(small, sizes, split=self.split), sizes=sizes)

    def _hand_out(self, probed: _Rows, part: int | None) -> None:
        """The next run gets the random numbers of a part's rows; of the whole, its own again."""
        if self._draws is not None:
            total = sum(probed.sizes)
            first = 0 if part is None else sum(probed.sizes[:part])
            self._draws.hand_out(first, total if part is None else probed.sizes[part], total)

    def _run(
        self, step: _seam.Step, trials: Trials, batch: Any, change: Callable[[Tensor], Tensor] | None = None
    ) -> _Run:
        seen: list[Tensor] = []
        terms: list[LossTerms] = []

        def look(loss: Tensor) -> Tensor:
            seen.append(loss.detach())
            terms.append(terms_of(loss))
            return loss if change is None else change(loss)

        gradient = trials.gradient_of(step, batch, look=look)
        return _Run(
            gradient=gradient,
            terms=terms[0],
            dtype=seen[0].dtype,
            loss=seen[0],
            logged=trials.logged,
            returned=trials.returned,
            values=trials.values,
            left=trials.captured or {},
        )

    def _compared(self, step: _seam.Step, trials: Trials, probed: _Rows) -> _Outcome:
        trials.capture = None
        if self._draws is not None:
            self._draws.record()
        whole = self._run(step, trials, probed.whole)
        if any_rank(step.trainer, not whole.counts):
            raise _NothingCountsError
        self._hand_out(probed, None)
        changes = [c for c in trials.changes if not c.composes and c.kind not in _CHANGED_IN_PARTS]
        state = self._capture(step, trials, changes, whole.dtype)
        scaled = self._run(step, trials, probed.whole, lambda loss: loss * SCALE)
        whole.left, again = scaled.left, scaled.gradient / SCALE
        comparison = Comparison(spans_of(step.trainer.lightning_module), whole.gradient, again)
        bent = self._bends(step, trials, probed, comparison)
        parts = [self._part(step, trials, probed, index) for index in range(len(probed.parts))]
        present = [part for part in parts if part is not None]
        rules = None
        if self._given == "auto" and present and not bent:
            rules = learned(whole.terms, [part.terms for part in present], whole.dtype)
            if isinstance(rules, LossRules) and self.rules is not None and rules.tells_less(self.rules):
                raise _NothingCountsError
        if isinstance(rules, LossRules):
            outcome = self._by_rules(step, trials, probed, rules, (whole, parts, comparison))
            if outcome is not None:
                outcome.changes, outcome.state = changes, state
                return outcome
        best = self._by_ways(probed, whole, parts, comparison)
        best.why = whole.terms.curved or (VARYING_FACTOR if rules == VARYING_FACTOR else "")
        best.changes, best.state = changes, state
        best.bends = bent
        if (
            best.why or bent
        ):  # it bends what it has reduced: a sample on which this does not show proves nothing
            best.miss = Miss(excess=float("inf"), relative_error=best.miss.relative_error)
        return best

    def _capture(
        self, step: _seam.Step, trials: Trials, changes: Sequence[StepChange], dtype: torch.dtype
    ) -> ComposedState | None:
        """Let the further runs tell what they leave in the attributes and lists that the step changes."""
        names = [c.name for c in changes if c.kind in ("attribute", "container")]
        if not names:
            return None
        exact = str(step.trainer.precision_plugin.precision) in ("32-true", "64-true")
        rounding = max(_LOGGED if exact else 2e-2, 10 * torch.finfo(dtype).eps)
        state = ComposedState(step.trainer.lightning_module, names, rounding)
        state.begin()
        trials.capture = state.left
        return state

    def _bends(self, step: _seam.Step, trials: Trials, probed: _Rows, comparison: Comparison) -> bool:
        """Whether gradients are no multiple of the loss's: what changes them would see those of a micro-batch.

        Half of a loss has half of its gradients to the bit. Where it has not, another run tells what kernels do in
        another order each time.
        """
        if str(step.trainer.precision_plugin.precision).startswith("16"):
            return False  # small gradients are rounded to fewer bits
        self._hand_out(probed, None)
        halved = self._run(step, trials, probed.whole, lambda loss: loss * 0.5).gradient * 2
        if not any_rank(step.trainer, comparison.bends(halved)):
            return False
        self._hand_out(probed, None)
        repeated = self._run(step, trials, probed.whole).gradient
        return any_rank(step.trainer, comparison.bends(halved, repeated))

    def _part(
        self,
        step: _seam.Step,
        trials: Trials,
        probed: _Rows,
        index: int,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> _Run | None:
        """A part's run; None where the module passes over it, though it has a loss of the whole."""
        self._hand_out(probed, index)
        try:
            return self._run(step, trials, probed.parts[index], change)
        except StepFailedError as error:
            if not error.skipped:
                raise
            return None

    def _by_rules(
        self,
        step: _seam.Step,
        trials: Trials,
        probed: _Rows,
        rules: LossRules,
        runs: tuple[_Run, list[_Run | None], Comparison],
    ) -> _Outcome | None:
        """The comparison by what the loss shows; None where its terms don't add up as they seem to."""
        whole, parts, comparison = runs
        kept = [index for index, part in enumerate(parts) if part is not None]
        counts = [_counts(rules, parts[index]) for index in kept]
        totals = [sum(values) for values in zip(*counts, strict=True)]
        rows = [probed.sizes[index] / sum(probed.sizes) for index in kept]
        mains = [_main(rules, count, totals, row) for count, row in zip(counts, rows, strict=True)]
        shares = [rules.shares(count, totals, main) for count, main in zip(counts, mains, strict=True)]
        alike = all(max(of_part) - min(of_part) <= 1e-12 for of_part in shares)
        miss = Miss(excess=0.0, relative_error=0.0)
        if alike:
            gradients = [parts[index].gradient for index in kept]  # pyright: ignore[reportOptionalMemberAccess]
            miss = comparison.miss(gradients, [of_part[0] for of_part in shares])
        several = len(rules.rules) > 1
        has_sums = any(rule.law is Law.SUM for rule in rules.rules)
        is_lone = has_sums and not _several(parts)
        if several and (not alike or has_sums or comparison.level > _COARSE):
            miss, rules, is_lone = self._term_by_term(step, trials, probed, rules, (shares, mains))
        if miss.excess > 1 and not several:
            return None  # a single term may be a mean of something that it does not show
        self.unlike = self.unlike or not alike
        return _Outcome(
            miss=miss,
            ways=self._open,
            rules=rules,
            whole=whole,
            parts=parts,
            shares=mains,
            comparison=comparison,
            is_lone=is_lone,
        )

    def _term_by_term(
        self,
        step: _seam.Step,
        trials: Trials,
        probed: _Rows,
        rules: LossRules,
        weights: tuple[Sequence[Sequence[float]], Sequence[float]],
    ) -> tuple[Miss, LossRules, bool]:
        """The worst miss of terms that are compared by themselves, behind no larger one; and the laws that held.

        Sums of one name, as the penalties on each of many parameters are, go together. A sum that is not that of its
        parts' may be one that looks at no row; one of which a part alone counts may be none, which is told last.
        """
        shares, mains = weights
        worst, laws, is_lone = Miss(excess=0.0, relative_error=0.0), list(rules.rules), False
        spans = spans_of(step.trainer.lightning_module)
        groups = _groups(rules)
        while groups:
            group = groups.pop()

            ones, few = [1.0] * len(rules.rules), [SCALE] * len(rules.rules)
            self._hand_out(probed, None)
            whole = self._run(step, trials, probed.whole, partial(_scaled_terms, rules, group, ones)).gradient
            self._hand_out(probed, None)
            again = self._run(step, trials, probed.whole, partial(_scaled_terms, rules, group, few)).gradient
            comparison = Comparison(spans, whole, again / SCALE)
            remaining, runs = iter(shares), list[_Run]()
            for index in range(len(probed.parts)):
                run = self._part(
                    step,
                    trials,
                    probed,
                    index,
                    lambda loss, group=group, left=remaining: _scaled_terms(rules, group, next(left), loss),
                )
                runs += [] if run is None else [run]
            gradients = [run.gradient for run in runs]
            miss, law = comparison.miss(gradients, [1.0] * len(gradients)), rules.rules[group[0]].law
            if law is Law.SUM and miss.excess > 1:
                of_all = comparison.miss(gradients, mains)
                if of_all.excess <= 1:
                    miss, law = of_all, Law.SHARED
                elif len(group) > 1:
                    groups += [[index] for index in group]
                    continue
            lone = law is Law.SUM and not _several(runs)
            if lone and laws[group[0]].divided:
                law = Law.MEAN  # by a count, as it seems, of which the other parts have none
            for index in group:
                laws[index] = replace(laws[index], law=law)
            is_lone = is_lone or lone
            worst = max(worst, miss, key=lambda miss: miss.excess)
        return worst, LossRules(rules=tuple(laws)), is_lone

    def _by_ways(
        self, probed: _Rows, whole: _Run, parts: list[_Run | None], comparison: Comparison
    ) -> _Outcome:
        """The comparison under each way of weighing that is open."""
        gradients = [torch.zeros_like(whole.gradient) if part is None else part.gradient for part in parts]
        misses = []
        for way in self._open:
            weights = self._weights(way, probed)
            misses.append(comparison.miss(gradients, weights))
        least = min(miss.excess for miss in misses)
        # A clear lead only: ways that differ by rounding stay open, in their order.
        kept = [index for index, miss in enumerate(misses) if miss.excess <= max(3 * least, 0.05)]
        return _Outcome(
            miss=misses[kept[0]],
            ways=[self._open[index] for index in kept],
            rules=None,
            whole=whole,
            parts=parts,
            shares=[float(weigher(self._open[kept[0]], probed.whole)(part)) for part in probed.parts],
            comparison=comparison,
        )

    def _weights(self, way: WeighBy | Weigher, probed: _Rows) -> list[float]:
        count = weigher(way, probed.whole)
        return normalized([float(count(part)) for part in probed.parts], summed=way == "sum")

    def _holds(self, step: _seam.Step, trials: Trials, probed: _Rows, outcome: _Outcome) -> None:
        """Keep how the parts add up, unless one hands something on to the next."""
        self.probes += 1
        self._wanted_probes = _PROBED_BATCHES  # rows of one batch may be too alike to act on each other
        self._smallest = min(self._smallest or probed.sizes[0], *probed.sizes)
        trials.capture, trials.between = None, None
        self.verdict = (
            _repeated_changes(step, probed, outcome)
            or self._independent(step, trials, probed, outcome)
            or Verdict(adds_up=True, relative_error=outcome.miss.relative_error)
        )
        self.unproven = ""
        self.rules, self.state = outcome.rules, outcome.state
        if outcome.rules is not None:
            self.foretold = _agreed(self.foretold, _foretold(outcome.rules, probed, outcome))
        self._open = outcome.ways
        self.weigh_by = self._open[0]
        present = [(index, part) for index, part in enumerate(outcome.parts) if part is not None]
        exact = str(step.trainer.precision_plugin.precision) in ("32-true", "64-true")
        allowed = decomposability.tolerance(step.trainer.lightning_module.parameters(), reduced=not exact)
        allowed = min(allowed, _LOGGED) if exact else allowed
        shares = outcome.shares if outcome.rules is not None else [outcome.shares[i] for i, _ in present]
        sizes = [probed.sizes[index] for index, _ in present]
        self.logs.compare(outcome.whole.logged, [part.logged for _, part in present], shares, sizes, allowed)
        counts = {"loss": list(shares), "samples": [float(size) for size in sizes]}
        self.returned.compare(outcome.whole.returned, [part.returned for _, part in present], counts, allowed)

    def _independent(
        self, step: _seam.Step, trials: Trials, probed: _Rows, outcome: _Outcome
    ) -> Verdict | None:
        """None where the second part's gradient is the same after the first as alone, else what to say of it."""
        second = outcome.parts[1]
        if second is None or outcome.parts[0] is None or not bool(second.gradient.isfinite().all()):
            return None  # a part in which nothing counts
        if self._draws is not None:
            return None  # with numbers that are handed out, another step before would take them
        failure, error = "", 0.0
        try:
            trials.between = None if outcome.state is None else outcome.state.begin_anew
            after = trials.gradient_of(step, probed.parts[1], after=probed.parts[0])
            comparison = Comparison(
                spans_of(step.trainer.lightning_module),
                second.gradient,
                second.gradient * (1 + outcome.comparison.level),
            )
            miss = comparison.miss([after], [1.0])
            error = miss.relative_error if miss.excess > 1 else 0.0
        except StepFailedError as failed:
            if failed.skipped or is_out_of_memory(failed.cause):
                raise
            error, failure = float("inf"), f" ({type(failed.cause).__name__}: {failed.cause})"
        error = largest_of_ranks(step.trainer, [error])[0]
        if error == 0:
            return None
        names = ", ".join(dict.fromkeys([*trials.handed_on, *(change.name for change in outcome.changes)]))
        return Verdict(
            adds_up=False,
            relative_error=error,
            cause=f"training_step hands values on to the next one{f', in {names}' if names else ''}: a part would "
            f"take over those of other samples{failure}",
            remedy="keep the batch whole (micro_batch_size = the loader's batch size), or keep them apart by sample",
        )

    def _mismatch(self, step: _seam.Step, outcome: _Outcome) -> Verdict:
        """Why the parts don't add up, and what to do about it."""
        if outcome.why:
            return Verdict(
                adds_up=False,
                relative_error=outcome.miss.relative_error,
                cause=f"the loss is no sum over its rows: {outcome.why} is applied to what was reduced over them",
                remedy="keep the batch whole (micro_batch_size = the loader's batch size; ActivationCheckpointing "
                "helps it to fit), or move it into the mean (a mean of roots for a root of a mean)",
            )
        if outcome.bends:
            hooks = hooks_run_by_part(step.trainer, step.trainer.lightning_module)
            named = f" ({', '.join(hooks[:3])})" if hooks else ""
            return Verdict(
                adds_up=False,
                relative_error=outcome.miss.relative_error,
                cause=f"half of the loss has not half of its gradients: a hook{named} or a backward of the module's "
                "own changes them by more than a factor, and would see those of a part",
                remedy="change gradients in on_before_optimizer_step, which runs once a step, or keep the batch "
                "whole (micro_batch_size = the loader's batch size)",
            )
        gradients = [part.gradient for part in outcome.parts if part is not None]
        if not gradients:
            error = outcome.miss.relative_error
            return Verdict(
                adds_up=False, relative_error=error, cause="no part has a loss", remedy="pass split="
            )
        shares = outcome.shares[: len(gradients)]
        verdict = decomposability.judge(outcome.whole.gradient, gradients, normalized(shares), 0.0)
        named = ", ".join(f"{name} ({error:.1%})" for name, error in outcome.miss.parameters)
        return Verdict(
            adds_up=False,
            relative_error=outcome.miss.relative_error,
            cause=f"{verdict.cause}{f'; most in {named}' if named else ''}",
            remedy=verdict.remedy,
        )


def _scaled_terms(rules: LossRules, group: Sequence[int], scales: Sequence[float], loss: Tensor) -> Tensor:
    """A loss whose backward sees some of its terms alone, each scaled."""
    reading = rules.read(terms_of(loss))
    scale_terms(reading, [scale if index in group else 0.0 for index, scale in enumerate(scales)])
    return loss * 1


def _groups(rules: LossRules) -> list[list[int]]:
    """Terms that are compared at once: sums of one name; and all of one law, where there are many more."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for index, rule in enumerate(rules.rules):
        alike = ("sums", rule.name) if rule.law is Law.SUM and not rule.divided else ("one", index)
        groups[alike if len(groups) < _TERMS or alike in groups else rule.law].append(index)
    return list(groups.values())


def _several(parts: Sequence[_Run | None]) -> bool:
    return sum(part is not None and part.counts for part in parts) > 1


def _counts(rules: LossRules, run: _Run | None) -> tuple[float, ...]:
    assert run is not None
    return rules.counts(rules.read(run.terms), run.loss, run.values)


def _main(rules: LossRules, counts: Sequence[float], totals: Sequence[float], rows: float) -> float:
    if not rules.means:
        return 1.0 if rules.summed else rows
    total = totals[rules.means[0]]
    return counts[rules.means[0]] / total if total else 0.0


def _foretold(rules: LossRules, probed: _Rows, outcome: _Outcome) -> list[list[Foretold]]:
    """The numbers of a batch that each term's divisor was in proportion to, in the batch and its parts."""
    present = [
        (batch, part) for batch, part in zip(probed.parts, outcome.parts, strict=True) if part is not None
    ]
    counts = [_counts(rules, outcome.whole), *(_counts(rules, part) for _, part in present)]
    batches = [probed.whole, *(batch for batch, _ in present)]
    return [
        foretelling(batches, [count[index] for count in counts]) if index in rules.means else []
        for index in range(len(rules.rules))
    ]


def _agreed(before: list[list[Foretold]], now: list[list[Foretold]]) -> list[list[Foretold]]:
    """What foretold divisors in all probes; another count than before only where none of these is left."""
    if len(before) != len(now):
        return now
    return [[way for way in ways if way in old] or ways for old, ways in zip(before, now, strict=True)]


def _repeated_changes(step: _seam.Step, probed: _Rows, outcome: _Outcome) -> Verdict | None:
    """None where parts change nothing but gradients, or what they change composes; else what to say of it."""
    state, kept = outcome.state, list(outcome.changes)
    if state is not None:
        present = [index for index, part in enumerate(outcome.parts) if part is not None]
        counts = {
            "loss": outcome.shares if outcome.rules is not None else [outcome.shares[i] for i in present],
            "samples": [float(probed.sizes[i]) for i in present],
        }
        composing = set(state.names)
        lefts = [part.left for part in outcome.parts if part is not None]
        losses = [part.loss for part in outcome.parts if part is not None]
        failed = set(state.learn(outcome.whole.left, lefts, counts, losses))
        noted = {name for name in failed if state.notes_integers(name, outcome.whole.left)}
        kept = [change for change in kept if change.name not in (composing - failed) | noted]
        if noted:
            names = ", ".join(sorted(noted))
            rank_zero_info(f"MemoryBudget: training_step adds to {names} once for each part of a batch.")
    if not any_rank(step.trainer, bool(kept)):
        return None
    names = ", ".join(str(change) for change in kept[:5]) or "what another rank's message names"
    return Verdict(
        adds_up=False,
        relative_error=0.0,
        cause=f"training_step changes {names}: in parts it would do so once for each of them",
        remedy="keep the batch whole (micro_batch_size = the loader's batch size), or change it once a step: in "
        "on_train_batch_end, or on_before_zero_grad",
    )


def _candidates(weigh_by: WeighBy | Weigher, batch: Any) -> list[WeighBy | Weigher]:
    """The ways of weighing to compare: the user's alone, or all that a batch may mean, the likeliest first."""
    if weigh_by != "auto" or hasattr(batch, "weight"):
        return [weigh_by]
    labels = find_labels(batch)
    if labels is None:
        return ["samples"]
    return ["labels", "samples"] if labels.ndim < 2 else ["labels", "causal_labels", "samples"]

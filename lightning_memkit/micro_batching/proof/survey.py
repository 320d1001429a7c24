"""Survey a batch before its micro-batches run: read the counts of the loss's terms by forwards only."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from lightning_memkit.micro_batching import SplittableBatch
from lightning_memkit.micro_batching.graph.loss_rules import LossRules
from lightning_memkit.micro_batching.graph.term_rules import Law
from lightning_memkit.micro_batching.graph.term_values import TermValues
from lightning_memkit.micro_batching.parts.batch_weights import Surveyed
from lightning_memkit.micro_batching.parts.cut import Cut, rows_together
from lightning_memkit.micro_batching.parts.partition import Partition
from lightning_memkit.micro_batching.proof.some_rows import count_of_rows, one_row
from lightning_memkit.micro_batching.proof.trials import Trials
from lightning_memkit.micro_batching.ranks.agreement import (
    any_rank,
    largest_of_ranks,
    sum_of_ranks,
)
from lightning_memkit.micro_batching.run import Run, Step
from lightning_memkit.micro_batching.shares.batch_counts import Foretelling, Shown
from lightning_memkit.micro_batching.shares.divisors import least_divisors, looked_at
from lightning_memkit.micro_batching.shares.foreseen import ForeseenWronglyError, UnforeseenLossError
from lightning_memkit.micro_batching.shares.lone_counts import WHOLE, LoneCounts, Look, saving_shapes_only

_TAKEN_FOR_A_SUM = (
    "MemoryBudget takes a term of the loss for a sum over the batch: training_step divides (or multiplies) it by the "
    "same number in each micro-batch, and in two of them as one. The whole batch, which would prove it, does not fit. "
    "A constant is all right; of a count that is kept from being less (clamp(min=...), max(n, ...)), divide by a "
    "number that adds up, or keep micro_batch_size at the loader's batch size."
)
_TAKEN_FOR_A_COUNT = (
    "MemoryBudget weighs ranks by what training_step divides a mean by. On one rank this number is the least so far, "
    "as if it were clamped for all rows of its batch (mask.mean().clamp(min=...)), and on another it is larger. If it "
    "is clamped, that rank weighs more than its rows do in the batch of all ranks. To be exact, divide a sum by a "
    "count: loss.sum() / mask.sum().clamp(min=...)."
)
_NEVER_TOGETHER = (
    "MemoryBudget can't prove by what training_step divides (or multiplies) a term of the loss in the effective "
    "batch: in micro-batches the number is no count of their rows, and rows of several loader batches are never there "
    "together. A constant is all right; of a count that is kept from being less (clamp(min=...), max(n, ...)), divide "
    "by a number that adds up, or let the loader's batches be of effective_batch_size."
)
_TAKEN_FOR_NOTHING = (
    "MemoryBudget takes rows of a micro-batch for such that count nothing: what training_step divides a mean by is "
    "kept from being less than a number (clamp(min=...), max(n, ...)) in these rows, and also where each is there "
    "twice. Up to half of that number may count in them. To be exact, keep the divisor from zero only (clamp(min=1) "
    "of a count)."
)


class Surveys:
    """Surveys batches by forwards of each micro-batch, and of several as one: looks (see `LoneCounts`).

    Args:
        run: the loop.
        trials: runs the forwards without a trace.
        has_windows: batches that make one step are weighed as one (`effective_batch_size`).
    """

    def __init__(self, run: Run, trials: Trials, *, has_windows: bool) -> None:
        self._run, self._trials, self._has_windows = run, trials, has_windows
        self._warned_of = set[str]()
        self._too_many_rows: float = float("inf")  # the fewest rows of a whole batch that could not be run
        self._differentiates = False  # the step takes gradients itself, and needs all that autograd saves

    def __call__(self, step: Step, cut: Cut, partition: Partition, rules: LossRules) -> Surveyed:
        """The counts of the loss's terms in the batch, over all ranks and divided by their number.

        Costs a forward of each micro-batch, which starts from the same state as in training. If a divisor may
        be a count or clamped, and nothing tells which, it costs another forward of two micro-batches as one,
        or of the whole batch, in which autograd saves only shapes.

        Raises:
            UnforeseenLossError: a micro-batch's loss has other terms, or such a look failed.
        """
        told, ranks = partition.combination.foretold, self._trials.ranks
        found, zeros = self._lone_counts(step, partition, rules), set[int]()
        with self._trials.no_trace(step, *cut.parts):
            ranks.alike(lambda: self._count(step, cut, partition, found, zeros))
            while any_rank(self._run, bool(found.looks())):
                asked = found.looks()
                ranks.alike(lambda: self._look(step, cut, partition, found))
                if not any_rank(self._run, found.looks() != asked):
                    break  # the looks that are left can't be run
            ranks.forget_part()
        totals = found.totals()
        if any_rank(self._run, totals is None) or totals is None:
            raise UnforeseenLossError(found.why)
        for index in found.terms:
            shown = found.shown(index, totals[index])
            if self._is_in_window and index in found.sums | found.whole and shown is Shown.OWN:
                self._warn(_NEVER_TOGETHER)  # the same number in micro-batches and in all of them
            if index in found.sums:
                told.confirm_sum(index, shown)
            else:
                told.confirm(index, step.batch, totals[index], shown)
                if index in zeros:
                    told.confirm_zeros(index, shown)
        if found.unproven:
            self._warn(_TAKEN_FOR_A_SUM)
        if found.vague:
            self._warn(_TAKEN_FOR_NOTHING)
        return self._of_all_ranks(totals, found, told)

    def _of_all_ranks(self, totals: Sequence[float], found: LoneCounts, told: Foretelling) -> Surveyed:
        """Totals averaged over ranks, as gradients are, and the batch's clamp of those below it."""
        run, terms = self._run, range(len(totals))
        fractions = [found.fraction(index) for index in terms]
        may_be = [bool(one) and told.is_least(index, one) for index, one in enumerate(fractions)]
        others = [bool(total) and not kept for total, kept in zip(totals, may_be, strict=True)]
        summed = sum_of_ranks(run, totals)
        largest = largest_of_ranks(run, [*map(found.least, terms), *may_be, *others])
        kept, some, more = (largest[len(terms) * column :][: len(terms)] for column in range(3))
        if any(map(min, some, more)):  # on one rank it may be clamped, and on another it is not
            self._warn(_TAKEN_FOR_A_COUNT)
        size = run.world_size
        return Surveyed([total / size for total in summed], [least / size for least in kept])

    @property
    def _is_in_window(self) -> bool:
        """Whether the batch's counts are added to those of other batches, which are weighed as one with it."""
        return self._has_windows and self._run.batches_a_step > 1

    def _warn(self, text: str) -> None:
        """Warn once."""
        if text not in self._warned_of:
            self._warned_of.add(text)
            warnings.warn(text, stacklevel=2)

    def _lone_counts(self, step: Step, partition: Partition, rules: LossRules) -> LoneCounts:
        """A `LoneCounts` without micro-batches, with the terms that need looks in any case."""
        told, is_alone = partition.combination.foretold, self._run.world_size == 1
        of_no_law = {index for index in rules.looked_up if rules.rules[index].law is Law.OWN}
        return LoneCounts(
            counts=[],
            lone=[],
            whole=told.unlike() | of_no_law,
            sums=rules.looked_up - of_no_law,
            doubted=told.doubted() if is_alone else frozenset(),
            runs_whole=not is_alone or count_of_rows(step.batch) < self._too_many_rows,
            adjacent=partition.split is not None or isinstance(step.batch, SplittableBatch),
            adds_up=not is_alone or self._is_in_window,
        )

    def _count(self, step: Step, cut: Cut, partition: Partition, found: LoneCounts, zeros: set[int]) -> None:
        """Note what each micro-batch counts, and which divisors of nothing are to be looked up."""
        assert partition.combination.rules is not None
        self._trials.draws.begin()
        if partition.combination.state is not None:
            partition.combination.state.begin()
        for own in self._each_counted(step, cut.parts, partition, partition.combination.rules):
            found.counts.append(own.counts)
            found.numbers.append(own.numbers)
            found.lone.append(own.lone)
            zeros.update(own.lone & own.zeros)

    def _look(self, step: Step, cut: Cut, partition: Partition, found: LoneCounts) -> None:
        """Run the looks that are needed; one that can't be run gives nothing."""
        rules = partition.combination.rules
        assert rules is not None
        looks, rows = [], []
        for look in found.looks():
            together = _rows_of(step.batch, cut, partition, look, adjacent=found.adjacent)
            if together is not None:
                looks.append(look)
                rows.append(together)
        try:
            saved = nullcontext() if self._differentiates else saving_shapes_only()
            with self._trials.within_budget(step) or nullcontext(), saved:
                counted = self._each_counted(step, rows, partition, rules)
                # First the generator: on several ranks it has to run to its end.
                for own, look in zip(counted, looks, strict=False):
                    found.learn(look, own.looked_at, doubted=own.averaged, numbers=own.numbers)
        except Exception as error:
            # Two micro-batches may need too much memory, or the step may fail on them. On several ranks the
            # error is raised, because all must retry together.
            if self._run.world_size > 1 or isinstance(error, ForeseenWronglyError):
                raise
            self._run.debug(f"MemoryBudget can't look at micro-batches as one: {error!r}")
            if WHOLE in looks and found.runs_whole:
                found.runs_whole = False
                self._too_many_rows = min(self._too_many_rows, count_of_rows(step.batch))

    def _each_counted(
        self, step: Step, parts: Sequence[Any], partition: Partition, rules: LossRules
    ) -> Iterator["_PartCounts"]:
        """What each micro-batch counts."""
        combination = partition.combination
        least = [one_row(step.batch)]  # for ranks that have nothing to run while others do
        for index in range(self._trials.ranks.most_parts(len(parts))):
            part = (parts or least)[min(index, max(len(parts) - 1, 0))]
            if combination.state is not None:
                combination.state.begin_anew()
            found = self._trials.ranks.part(
                lambda part=part: self._counted(step, part, rules, combination.foretold),
                counts=False,
                smallest=lambda part=part: step.forward(self._run.transfer(one_row(part))),
                kind="survey",
            )
            if index < len(parts):
                yield found

    def _counted(self, step: Step, part: Any, rules: LossRules, foretold: Foretelling) -> "_PartCounts":
        if self._trials.draws.proven:
            self._trials.draws.restore()
        with TermValues() as noted:
            loss, _ = step.forward(self._run.transfer(part))
        self._differentiates = self._differentiates or noted.differentiates
        if loss is None:
            nothing = (0.0,) * len(rules.rules)
            return _PartCounts(nothing, nothing, nothing)
        reading = rules.reading_of(loss)
        own = list(rules.counts(reading, loss, noted.values))
        least = least_divisors(rules, reading, foretold, part, own)
        zeros = frozenset(index for index, count in enumerate(own) if not count)
        for index in least.lone:
            own[index] = reading.divisors[index]
        for index, count in least.counts.items():
            own[index] = count
        numbers = tuple(map(reading.own_number, range(len(own))))
        return _PartCounts(
            tuple(own), looked_at(rules, reading, own), numbers, least.lone, zeros, least.averaged
        )


class _PartCounts(NamedTuple):
    """What a micro-batch counts.

    Attributes:
        counts: of each term.
        looked_at: the result of `looked_at`, for a look.
        numbers: see `LoneCounts.numbers`.
        lone: the terms that are to be looked up.
        zeros: the terms whose value is exactly zero.
        averaged: see `LeastDivisors`.
    """

    counts: tuple[float, ...]
    looked_at: tuple[float, ...]
    numbers: tuple[float, ...]
    lone: frozenset[int] = frozenset()
    zeros: frozenset[int] = frozenset()
    averaged: frozenset[int] = frozenset()


def _rows_of(batch: Any, cut: Cut, partition: Partition, look: Look, *, adjacent: bool) -> Any:
    """The rows of a look; None if they can't be put together."""
    if look is None:  # `WHOLE`
        return batch
    together = rows_together(batch, cut, partition.split, *sorted(look), adjacent=adjacent)
    return None if together is None else together[0]

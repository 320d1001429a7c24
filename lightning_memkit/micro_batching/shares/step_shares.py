"""Weigh the micro-batches of one batch while they run, and bring the gradients to the batch's scale at its end."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_memkit.micro_batching.graph.loss_rules import VARYING_FACTOR, LossRules
from lightning_memkit.micro_batching.graph.rests import Rest
from lightning_memkit.micro_batching.graph.term_rules import (
    Law,
    Reading,
    UnseenValueError,
    alike,
    same_factors,
)
from lightning_memkit.micro_batching.graph.term_scales import scale_terms
from lightning_memkit.micro_batching.graph.term_values import rounding_of_terms, weighed_value
from lightning_memkit.micro_batching.shares.batch_counts import Foretelling
from lightning_memkit.micro_batching.shares.divisors import BatchSums, SameTerms, least_divisors, main_mean
from lightning_memkit.micro_batching.shares.foreseen import (
    KeptConstantError,
    LoneCountError,
    MistakenTotalsError,
    UnforeseenLossError,
    UnknownTotalsError,
    VaryingFactorError,
)

_SAME = 1e-12
ADD_UP = 1e-9  # how far from 1 the fractions of a batch may add up, by rounding


class StepShares:
    """What each micro-batch of a batch weighs, read off its loss.

    A loss whose terms all weigh alike is scaled by one number relative to a reference; `factor` brings the sum of all
    micro-batches to the batch's own scale. Terms that weigh unlike are scaled one by one, which takes totals.

    Attributes:
        lone: by term, 1 where a divisor of 1 may be no count, so that `counted` can't be trusted.
        fractions: by mean, how much of it the micro-batches have accumulated; more than 1 where their divisors are
            clamped.
        beside: by mean, 1 where a learned factor scales it together with a number that has no gradient.
        shared: how much of a term that depends on no row has been accumulated; None where the loss has no such term.
        contributions: what the terms of each micro-batch add to the batch's loss, where values were noted.
        rests: the parts of the micro-batches' losses that have no gradient, where values were noted.
        same: checks that micro-batches have the same terms.

    Args:
        rules: how the loss's terms add up.
        totals: what each term counts in the whole batch, over all ranks and divided by their number; None if unknown.
        is_known: the totals are the batch's own, not those of a batch that was accumulated before.
        looked_up: what each term counts in this batch, whether its least divisors are clamped or not, and the divisor
            in it of terms that seem sums; None where that was not looked up.
        by_itself: the batch's loss is its own, not a part of one over further batches or ranks.
        ranks: the number of ranks that have one batch between them.
    """

    def __init__(
        self,
        rules: LossRules,
        totals: Sequence[float] | None,
        *,
        is_known: bool = False,
        looked_up: Sequence[float] | None = None,
        by_itself: bool = True,
        ranks: int = 1,
    ) -> None:
        self.rules = rules
        self.lone = [0.0] * len(rules.rules)
        self.looked_up = looked_up
        self.ranks = ranks
        self.same = SameTerms(rules, looked_up, by_itself=by_itself)
        self.counted = [0.0] * len(rules.rules)
        self.fractions, self.beside = [0.0] * len(rules.rules), [0.0] * len(rules.rules)
        self.totals = list(totals) if totals is not None else None
        self.is_known = is_known
        self.was_unlike = False
        self.contributions: list[Tensor | None] = []
        self.rests: list[Rest] = []
        self._factors: tuple[Tensor, ...] | None = None
        self._ran = 0
        self.shared = 0.0 if any(rule.law is Law.SHARED for rule in rules.rules) and rules.means else None

    def scaled(
        self,
        loss: Tensor,
        rows: float,
        over: float,
        values: Mapping[tuple[Any, int], Tensor] | None = None,
        foretelling: Foretelling | None = None,
        part: Any = None,
    ) -> tuple[Tensor | None, float]:
        """The scaled loss for a micro-batch's backward, None where nothing of it counts; and what its loss counts.

        Args:
            loss: of the micro-batch.
            rows: its fraction of the batch's rows, for a loss that depends on none.
            over: how many batches are accumulated, each a mean of its own.
            values: the numbers that the step computed, from which `contributions` are made.
            foretelling: tells a divisor that is a count from one that is clamped.
            part: the micro-batch.

        Raises:
            UnforeseenLossError: the loss has other terms or factors than the micro-batches before.
            UnknownTotalsError: the totals have to be known before the batch runs.
            LoneCountError: divisors have to be looked up before the batch runs.
            UnseenValueError: `values` are needed.
        """
        reading = self.rules.reading_of(loss)
        if self._factors is None:
            self._factors = reading.factors
        elif not same_factors(self._factors, reading.factors, loss.dtype):
            raise VaryingFactorError(VARYING_FACTOR)
        own = self.rules.counts(reading, loss, values)
        least = least_divisors(self.rules, reading, foretelling, part, own)
        if least.lone and self.looked_up is None:
            raise LoneCountError
        self.same.compare(reading, loss.dtype, foretelling, least.lone)
        counts = list(own)
        for index in {*least.lone, *least.counts} & set(self.rules.means):
            counts[index] = reading.divisors[index]  # whatever it counts, this is what it was divided by
        kept = [least.counts.get(index, 1.0) == 0 for index in range(len(counts))]
        if any(kept) and values is None:
            raise UnseenValueError  # the batch's loss is no mean of its micro-batches' losses any more
        for index in least.lone:
            self.lone[index] = 1.0
        real = [least.counts.get(index, count) for index, count in enumerate(counts)]
        self.counted = [before + count for before, count in zip(self.counted, real, strict=True)]
        shares = self._shares(counts, real, rows)
        for index in least.lone & self.rules.looked_up:
            shares[index] = self.same.share(index, reading.divisors[index])
            if shares[index] != 1 and values is None:
                raise UnseenValueError
        main = self.rules.means[0] if self.rules.means else None
        # Reported values are weighed by the likelier count: a term that is zero counts nothing.
        likely = [least.counts.get(index, count) for index, count in enumerate(own)]
        weight = likely[main] if main is not None else (1.0 if self.rules.summed else rows)
        for index in self.rules.means:
            self.fractions[index] += shares[index]
        weighed = None if values is None else weighed_value(loss, reading, shares, values)
        if any(reading.offset):
            self._note_beside(reading, weighed, rounding_of_terms(reading, values or {}, loss.detach()))
        if values is not None:
            self._contribute(weighed, likely, rows)
        if not any(shares):
            return None, weight
        if not weight:
            weight = 1.0 if self._ran else weight
        if alike(shares):
            return loss * (shares[0] / over), weight
        if not reading.scales_apart(shares):
            raise UnforeseenLossError("terms of unlike shares below one learned factor")
        self.was_unlike = True
        scale_terms(reading, [share / over for share in shares])
        return loss * 1, weight

    def _note_beside(
        self, reading: Reading, weighed: tuple[Tensor, list[Tensor] | None] | None, rounding: float
    ) -> None:
        """Note the means that a learned factor scales together with a constant, or with what may be one."""
        for index in self.rules.means:
            if self.beside[index] or not reading.offset[index]:
                continue
            pieces = weighed[1] if weighed is not None else None
            # The constant is added to the mean, or stands beside all terms in a stack of losses.
            told = None if pieces is None else [float(pieces[place].detach()) for place in (index, -1)]
            if told is None or not max(map(abs, told)) <= rounding:
                self.beside[index] = 1.0

    def _contribute(
        self, weighed: tuple[Tensor, list[Tensor] | None] | None, counts: Sequence[float], rows: float
    ) -> None:
        terms, pieces = weighed or (None, None)
        self.contributions.append(terms)
        if pieces is not None:
            self.rests.append(Rest(pieces=pieces, counts=counts, rows=rows))

    def nothing(self, loss: Tensor) -> Tensor:
        """A loss whose backward runs like any other and leaves exact zeros: other ranks wait in it."""
        reading: Reading = self.rules.reading_of(loss)
        scale_terms(reading, [0.0] * len(reading.nodes))
        return loss * 1

    def sums(self) -> "BatchSums":
        """What the micro-batches of this rank add up to."""
        return BatchSums(
            counted=self.counted,
            lone=self.lone,
            fractions=self.fractions,
            beside=self.beside,
            shared=self.shared or 0.0,
            unlike=float(self.was_unlike),
        )

    def counted_of(self, overall: "BatchSums") -> list[float]:
        """What the terms counted on all ranks; where that can't be trusted, what was looked up."""
        if self.looked_up is None:
            return overall.counted
        looked_up = zip(overall.counted, self.looked_up, overall.lone, strict=True)
        return [total if lone > 0 else own for own, total, lone in looked_up]

    def factor(self, overall: "BatchSums") -> float:
        """What gradients are multiplied with once the batch has run; 1 where its totals were right.

        Args:
            overall: `sums`, of all ranks and divided by their number.

        Raises:
            MistakenTotalsError: terms that weigh unlike were scaled by wrong totals, or totals of zero although
                something counts, or a term that depends on no row was accumulated more or less than once.
            KeptConstantError: see `refuse_constants`.
        """
        factor = self._factor(self.counted_of(overall), unlike=overall.unlike > 0)
        # Whatever each micro-batch counted, a term that depends on no row is accumulated once.
        if self.shared is not None and not self._is_one(overall.shared * factor):
            raise MistakenTotalsError
        self.refuse_constants(overall.fractions, overall.beside, factor)
        return factor

    def refuse_constants(self, fractions: Sequence[float], beside: Sequence[float], factor: float) -> None:
        """Check that a constant which a learned factor scales together with a mean was accumulated once.

        Args:
            fractions: how much of each mean was accumulated, before gradients are multiplied.
            beside: above 0 for a mean with such a constant.
            factor: what gradients are multiplied with.

        Raises:
            KeptConstantError: it was not, since the mean's divisor is clamped.
        """
        for index in self.rules.means:
            if beside[index] > 0 and not self._is_one(fractions[index] * factor):
                raise KeptConstantError

    def _is_one(self, fractions: float) -> bool:
        """Whether fractions add up."""
        return abs(fractions - 1) <= ADD_UP + max(
            self.rules.rules[index].excess for index in self.rules.means
        )

    def _factor(self, counted: Sequence[float], *, unlike: bool) -> float:
        if self.totals is None or not self.rules.means:
            return 1.0
        if any(counted[index] and not self.totals[index] for index in self.rules.means):
            raise MistakenTotalsError
        added = [rule.excess / self.ranks for rule in self.rules.rules]
        factors = [
            (self.totals[index] + added[index]) / (counted[index] + added[index])
            for index in self.rules.means
            if counted[index]
        ]
        if all(abs(factor - 1) <= _SAME for factor in factors):
            return 1.0
        if unlike or not alike(factors):
            raise MistakenTotalsError
        return factors[0]

    def _shares(self, counts: Sequence[float], real: Sequence[float], rows: float) -> list[float]:
        """The weight of a micro-batch in each term.

        Args:
            counts: what each term is divided by.
            real: what each term counts, where a least divisor hides it.
            rows: the micro-batch's fraction of the batch's rows.
        """
        means = self.rules.means
        if not means:
            return self.rules.shares(counts, counts, rows)
        if not self.is_known and self.rules.needs_totals:
            raise UnknownTotalsError
        if self.totals is None:
            if not any(counts[index] for index in means):
                return [0.0] * len(counts)
            self.totals = [float(count) for count in counts]
        if self.is_known and not any(self.totals[index] for index in means):
            return self._of_nothing(counts)
        if self.is_known and self.looked_up is not None:
            main = rows  # divisors may be more than counts, and then don't add up to the batch's
        else:
            main = self._share(real, main_mean(self.rules, self.totals))
        if self.shared is not None:
            self.shared += main
        if not self.is_known and not alike([self._share(counts, index) for index in means]):
            raise UnknownTotalsError
        return self.rules.shares(counts, self.totals, main, ranks=self.ranks)

    def _of_nothing(self, counts: Sequence[float]) -> list[float]:
        """The weights in a batch in which nothing counts."""
        self._ran += 1
        if self.shared is not None and self._ran == 1:
            self.shared += 1
        # All ranks' batch is divided by the least divisor once, and gradients are averaged over ranks.
        kept = self.ranks if any(counts[index] for index in self.rules.means) else 0
        return self.rules.shares_of_nothing(is_first=self._ran == 1, kept=kept)

    def _share(self, counts: Sequence[float], index: int) -> float:
        total = self.totals[index] if self.totals is not None else 0.0
        return counts[index] / total if total else 0.0

"""Weigh a micro-batch in its batch's loss by the divisors that its own graph shows; exact for any counts.

A term of a loss is a sum over the batch's rows, divided by something: the weight of the labels, the number of
tokens that a mask keeps, a number of elements. Comparing the divisors of a whole batch with those of its
micro-batches gives the term's law: they add up (a mean), or are equal (a sum). From then on a micro-batch's
own divisor gives its weight, called its share of the term: divisor over total for a mean, 1 for a sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lightning_memkit.micro_batching.graph.loss_terms import (
    LossTerms,
    collapsed,
)
from lightning_memkit.micro_batching.graph.loss_walk import terms_of
from lightning_memkit.micro_batching.graph.term_names import by_name, has_columns, without_source
from lightning_memkit.micro_batching.graph.term_rules import (
    Law,
    Reading,
    TermRule,
    UnseenValueError,
    absent,
    difference_of,
    hidden_of,
    on_host,
)
from lightning_memkit.micro_batching.shares.foreseen import UnforeseenLossError

# A divisor below this is no count: it is an epsilon that was added or clamped to, against a division by zero.
SMALL = 1e-3 * (1 + 1e-6)  # with float32's rounding of 1e-3
VARYING_FACTOR = "a factor that is made of the batch's rows"


@dataclass(frozen=True, kw_only=True)
class LossRules:
    """The rules by which a loss's terms add up: learned from some rows, then applied to every micro-batch.

    Args:
        rules: one rule for each term.
        apart: the name of terms of which later rows lacked some, so that their sources have to tell them apart.
    """

    rules: tuple[TermRule, ...]
    apart: str = ""

    @property
    def summed(self) -> bool:
        """Whether every micro-batch weighs 1."""
        return all(rule.law is not Law.MEAN for rule in self.rules) and any(
            rule.law is not Law.SHARED for rule in self.rules
        )

    @property
    def renamed(self) -> dict[str, str]:
        """The name of the rule that each alias belongs to."""
        return {alias: rule.name for rule in self.rules for alias in rule.aliases}

    @property
    def sources(self) -> dict[tuple[str, int], str]:
        """The names of the rules that a source tells apart, by their terms' name and source."""
        told = (rule for rule in self.rules if rule.source)
        return {(without_source(rule.name)[0], rule.source): rule.name for rule in told}

    @property
    def by_column(self) -> bool:
        """Whether the columns of a vector of quotients are terms (see `terms_of`)."""
        return has_columns(rule.name for rule in self.rules)

    def named_as_in(self, others: "LossRules") -> "LossRules":
        """The rules with the further names that their terms had in other rows, which were compared, too."""
        aliases = {(rule.name, rule.index): rule.aliases for rule in others.rules}
        return LossRules(
            rules=tuple(
                replace(rule, aliases=rule.aliases | aliases.get((rule.name, rule.index), frozenset()))
                for rule in self.rules
            )
        )

    def reading_of(self, loss: Tensor) -> Reading:
        """Read the divisors of a micro-batch's loss off its graph; see `read`."""
        return self.read(terms_of(loss, by_column=self.by_column))

    def read(self, seen: LossTerms) -> Reading:
        """Read the divisors of a micro-batch's loss.

        A mean that it lacks counts nothing; what the batch divides by tells whether that is so (see `LoneCounts`).

        Raises:
            UnforeseenLossError: its loss has other terms than the rules.
        """
        if self.by_column and seen.by_column is not None:
            seen = seen.by_column
        if not seen.terms and (seen.opaque or seen.curved):
            raise UnforeseenLossError(seen.opaque or seen.curved)
        named = by_name(seen.terms, self.renamed, self.sources)
        missing = frozenset(
            index
            for index, rule in enumerate(self.rules)
            if rule.name not in named and (rule.law is Law.MEAN or rule.looks_up) and not rule.fixed
        )
        wanted = {(rule.name, rule.branch): 0 for rule in self.rules}
        for rule in self.rules:
            wanted[rule.name, rule.branch] += 1
        lacked = {self.rules[index].name for index in missing}
        if {name for name, _ in wanted} - lacked != named.keys():
            raise UnforeseenLossError(difference_of({name for name, _ in wanted} - lacked, named.keys()))
        for (name, branch), count in wanted.items():
            if branch is None and name not in lacked and len(named[name]) != count:
                raise UnforeseenLossError(f"{len(named[name])} terms {name} for {count}", name)
        terms = [
            absent(rule.name)
            if index in missing
            else named[rule.name][rule.index]
            if rule.branch is None
            else collapsed(named[rule.name], rule.branch)
            for index, rule in enumerate(self.rules)
        ]
        for rule, term in zip(self.rules, terms, strict=True):
            if rule.branch is None and hidden_of(term):
                raise UnforeseenLossError(hidden_of(term))
        numbers = on_host([term.divisor for term in terms] + [term.quotient for term in terms])
        apart = [
            [] if index in missing else named[rule.name] if rule.branch is not None else [term]
            for index, (rule, term) in enumerate(zip(self.rules, terms, strict=True))
        ]
        return Reading(
            divisors=numbers[: len(terms)],
            quotients=numbers[len(terms) :],
            nodes=tuple(t.nodes for t in terms),
            multiplied=tuple(t.is_multiplied for t in terms),
            averaged=tuple(t.averaged for t in terms),
            shared_factors=tuple(
                tuple(t.shared_factor for t in of_rule if t.shared_factor is not None) for of_rule in apart
            ),
            is_crossed=seen.is_crossed,
            bottoms=tuple(tuple(t.bottom for t in of_rule) for of_rule in apart),
            products=tuple(tuple(one for t in of_rule for one in t.products) for of_rule in apart),
            shared_products=tuple(
                tuple(one for t in of_rule for one in t.shared_products) for of_rule in apart
            ),
            tops=tuple(tuple(t.top for t in of_rule) for of_rule in apart),
            summands=tuple(tuple(t.summand for t in of_rule) for of_rule in apart),
            sums=tuple(tuple(t.sums for t in of_rule) for of_rule in apart),
            offset=tuple(any(t.is_offset for t in of_rule) for of_rule in apart),
            factors=tuple(
                term.factors[i]
                for rule, term in zip(self.rules, terms, strict=True)
                for i in rule.fixed
                if i < len(term.factors)
            ),
            missing=missing,
            of_one=tuple(
                term
                if rule.law is Law.MEAN and rule.branch is None and not (rule.source or rule.has_many_sources)
                else None
                for rule, term in zip(self.rules, terms, strict=True)
            ),
        )

    def tells_less(self, known: "LossRules") -> bool:
        """Whether `known` has a mean where these rules saw equal divisors, which may be clamped counts."""
        means = {(rule.name, rule.index, rule.branch) for rule in known.rules if rule.law is Law.MEAN}
        return any(
            rule.law is Law.SUM and rule.looks_up and (rule.name, rule.index, rule.branch) in means
            for rule in self.rules
        )

    def counts(
        self, reading: Reading, loss: Tensor, values: Mapping[tuple[Any, int], Tensor] | None = None
    ) -> tuple[float, ...]:
        """The count of a micro-batch in each term: a mean's divisor less its epsilon (or 0), else 1.

        A divisor of 1, or one near zero, may only guard against a division by zero
        (`mask.sum().clamp(min=1)`): if the term is exactly zero as well, it counts nothing.

        Args:
            reading: the terms that were read from its loss.
            loss: its loss.
            values: the numbers that its step has computed (see `TermValues`). Without them, the value of a
                single term is taken from the loss.

        Raises:
            UnseenValueError: the value of one of several terms is needed, and `values` is None.
        """
        counted = list(reading.divisors)
        for index, (rule, quotient) in enumerate(zip(self.rules, reading.quotients, strict=True)):
            if rule.law is not Law.MEAN:
                counted[index] = 1.0
            elif quotient == 1.0 or 0 < abs(quotient) <= SMALL:
                if self._is_zero(index, reading, loss, values):
                    counted[index] = 0.0
            if rule.excess and counted[index]:
                counted[index] = max(counted[index] - rule.excess, 0.0)
        return tuple(counted)

    def _is_zero(
        self, index: int, reading: Reading, loss: Tensor, values: Mapping[tuple[Any, int], Tensor] | None
    ) -> bool:
        own = [None if values is None else top.number.value(values) for top in reading.tops[index]]
        if len(self.rules) == 1 and any(value is None for value in own):
            return float(loss.detach()) == 0
        if values is None:
            raise UnseenValueError
        return all(value is not None and float(value) == 0 for value in own)

    def shares(
        self, counts: Sequence[float], totals: Sequence[float], main: float, *, ranks: int = 1
    ) -> list[float]:
        """A micro-batch's share of each term.

        Args:
            counts: its counts.
            totals: the whole batch's counts; if ranks share one batch, the sum over ranks divided by their
                number.
            main: the share of a term that depends on no row.
            ranks: the number of ranks.
        """
        by_law = {Law.SUM: 1.0, Law.OWN: 1.0, Law.SHARED: main}
        return [
            by_law[rule.law] if rule.law in by_law else self._share(index, count, total, ranks)
            for index, (rule, count, total) in enumerate(zip(self.rules, counts, totals, strict=True))
        ]

    def shares_of_nothing(self, *, is_first: bool, kept: float = 0.0) -> list[float]:
        """A micro-batch's share of each term if no mean counts anything in the whole batch.

        Sums add up as usual. One micro-batch stands for the whole batch in the terms that depend on no row,
        and in the means.

        Args:
            is_first: this is that micro-batch.
            kept: the share of the means if their divisors are clamped above zero and the terms are not zero.
        """
        once = 1.0 if is_first else 0.0
        by_law = {Law.SUM: 1.0, Law.OWN: 1.0, Law.SHARED: once, Law.MEAN: kept or once}
        return [by_law[rule.law] for rule in self.rules]

    def _share(self, index: int, count: float, total: float, ranks: int) -> float:
        """A micro-batch's share of a mean; both divisors include the epsilon that the step adds."""
        excess = self.rules[index].excess
        return (count + excess) / (total + excess / ranks) if count and total else 0.0

    @property
    def means(self) -> tuple[int, ...]:
        """The indices of the rules whose divisors add up."""
        return tuple(index for index, rule in enumerate(self.rules) if rule.law is Law.MEAN)

    def looking_up(self, kept: Sequence[int]) -> "LossRules":
        """The rules with the means in `kept` turned into sums whose whole-batch divisor is looked up."""
        return LossRules(
            rules=tuple(
                replace(rule, law=Law.SUM, numbered=True) if index in kept else rule
                for index, rule in enumerate(self.rules)
            )
        )

    @property
    def looked_up(self) -> frozenset[int]:
        """The indices of the rules that are no mean, and whose divisor in the whole batch is looked up."""
        return frozenset(index for index, rule in enumerate(self.rules) if rule.looks_up)

    @property
    def has_own_numbers(self) -> bool:
        """Whether the step divides or multiplies a term by a number of its own."""
        return any(rule.numbered for rule in self.rules)

    @property
    def needs_totals(self) -> bool:
        """Whether totals must be known before the first backward, because terms have different shares.

        This holds for sums beside means, and for a mean with an epsilon beside any other term.
        """
        has_epsilon = len(self.rules) > 1 and any(rule.excess for rule in self.rules)
        return bool(self.means) and (
            has_epsilon or any(rule.law in (Law.SUM, Law.OWN) for rule in self.rules)
        )

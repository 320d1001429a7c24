"""What each micro-batch weighs in its batch's loss, by the divisors that its own graph shows: exact for any counts.

A term of a loss is a sum over the batch's rows, divided by something: the weight of the labels, the tokens that a mask
leaves, a number of elements. Seen once in a whole batch and in its micro-batches, the divisors tell the law: they add
up (a mean), or are the same (a sum). From then on every micro-batch's own divisors say what it weighs: divisor over
total for a mean, 1 for a sum.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.micro_batching.graph.loss_terms import (
    Addend,
    Divisor,
    Edge,
    LossTerm,
    LossTerms,
    collapsed,
)
from lightning_memkit.micro_batching.shares.foreseen import UnforeseenLossError

ALIKE = 1e-9  # relative: shares that differ by less are the same
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# A divisor below counts nothing: it was added to, or clamped, so that nothing is divided by zero.
SMALL = 1e-3
VARYING_FACTOR = "a factor that is made of the batch's rows"


class Law(Enum):
    """How a term's divisors in micro-batches make the whole batch's."""

    MEAN = "mean"  # they add up
    SUM = "sum"  # they are the same, and the term's sum runs over the rows
    OWN = "own"  # neither, and the step's own: a root of a count, one more than it. The whole batch's is looked up
    SHARED = "shared"  # they are the same, and so is the term: it looks at no row (weight decay in the loss)


class UnseenValueError(Exception):
    """Whether a term counts nothing shows in its value, which was not noted."""


@dataclass(frozen=True, kw_only=True)
class TermRule:
    """One term of a loss, and how it adds up.

    Args:
        name: the term's name in the graph.
        index: which of several terms of that name it is.
        law: how its divisors make the whole's.
        branch: where rows that a step adds up one by one come together; None where terms are taken as they are.
        excess: what every divisor holds more than its rows: the epsilon that keeps it from zero.
        fixed: which of its factors are not its rows' own, and so the same in every micro-batch.
        divided: the step itself divides it by a number that it has counted, which was 1 wherever it was looked at: one
            that is kept from being zero, or a constant.
        numbered: the step divides it, or multiplies it, by a number of its own.
    """

    name: str
    index: int
    law: Law
    branch: str | None = None
    excess: float = 0.0
    fixed: tuple[int, ...] = ()
    divided: bool = False
    numbered: bool = False

    @property
    def looks_up(self) -> bool:
        """Whether its divisor in the whole batch is looked up: until it is known to be a constant, or in each batch.

        One that was the same in all that was compared may also be a count that is kept from being less.
        """
        return self.law is Law.OWN or (self.law is Law.SUM and self.numbered)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A micro-batch's divisors and quotients (see `LossTerm`), one a rule, its nodes, and factors that may not vary.

    Of each rule `multiplied` (`Term.is_multiplied`), `tops`, `summands`, `sums`, `shared_factors`, `bottoms`,
    products and `offset` hold what its terms have (see `LossTerm`).
    """

    divisors: tuple[float, ...]
    quotients: tuple[float, ...]
    nodes: tuple[tuple[Any, ...], ...]
    multiplied: tuple[bool, ...] = ()
    tops: tuple[tuple[Addend, ...], ...] = ()
    summands: tuple[tuple[Addend, ...], ...] = ()
    sums: tuple[tuple[tuple[Addend, ...], ...], ...] = ()
    factors: tuple[Tensor, ...] = ()
    shared_factors: tuple[tuple[Any, ...], ...] = ()
    is_crossed: bool = False
    bottoms: tuple[tuple[Any, ...], ...] = ()
    products: tuple[tuple[Edge, ...], ...] = ()
    shared_products: tuple[tuple[Edge, ...], ...] = ()
    offset: tuple[bool, ...] = ()

    def is_one(self, index: int) -> bool:
        """Whether the step itself divides a term by 1, or multiplies it so: by a count, or by what stands for none."""
        return self.quotients[index] == 1.0 or (
            bool(self.multiplied) and self.multiplied[index] and abs(self.divisors[index] - 1) <= ALIKE
        )

    def is_divided(self, index: int) -> bool:
        """Whether the step itself divides a term, or multiplies it by what may be one over a number of its own."""
        return bool(self.quotients[index]) or (bool(self.multiplied) and self.multiplied[index])

    def scales_apart(self, shares: Sequence[float]) -> bool:
        """Whether each term can be scaled by its own share: those below one learned factor have one."""
        if self.is_crossed:
            return alike(shares)
        of_factors: dict[Any, list[float]] = defaultdict(list)
        for factors, share in zip(self.shared_factors, shares, strict=True):
            for factor in factors:
                of_factors[factor].append(share)
        return all(alike(own) for own in of_factors.values())


@dataclass(frozen=True, kw_only=True)
class LossRules:
    """How a loss's terms add up: proven on some rows, then read in every micro-batch.

    Args:
        rules: one for each term.
    """

    rules: tuple[TermRule, ...]

    @property
    def summed(self) -> bool:
        """Whether every micro-batch weighs 1."""
        return all(rule.law is not Law.MEAN for rule in self.rules) and any(
            rule.law is not Law.SHARED for rule in self.rules
        )

    def read(self, seen: LossTerms) -> Reading:
        """A micro-batch's divisors.

        Raises:
            UnforeseenLossError: its loss has other terms.
        """
        if not seen.terms:
            raise UnforeseenLossError(seen.opaque or "a loss without terms")
        named = by_name(seen.terms)
        wanted = {(rule.name, rule.branch): 0 for rule in self.rules}
        for rule in self.rules:
            wanted[rule.name, rule.branch] += 1
        if {name for name, _ in wanted} != named.keys():
            raise UnforeseenLossError(difference_of({name for name, _ in wanted}, named.keys()))
        for (name, branch), count in wanted.items():
            if branch is None and len(named[name]) != count:
                raise UnforeseenLossError(f"{len(named[name])} terms {name} for {count}")
        terms = [
            named[rule.name][rule.index] if rule.branch is None else collapsed(named[rule.name], rule.branch)
            for rule in self.rules
        ]
        for rule, term in zip(self.rules, terms, strict=True):
            if rule.branch is None and hidden_of(term):
                raise UnforeseenLossError(hidden_of(term))
        numbers = _on_host([term.divisor for term in terms] + [term.quotient for term in terms])
        apart = [
            named[rule.name] if rule.branch is not None else [term]
            for rule, term in zip(self.rules, terms, strict=True)
        ]
        return Reading(
            divisors=numbers[: len(terms)],
            quotients=numbers[len(terms) :],
            nodes=tuple(t.nodes for t in terms),
            multiplied=tuple(t.is_multiplied for t in terms),
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
        )

    def tells_less(self, known: "LossRules") -> bool:
        """Whether other rows have told more of a term whose divisor is the same everywhere here: it may be a count."""
        means = {(rule.name, rule.index, rule.branch) for rule in known.rules if rule.law is Law.MEAN}
        return any(
            rule.law is Law.SUM and rule.looks_up and (rule.name, rule.index, rule.branch) in means
            for rule in self.rules
        )

    def counts(
        self, reading: Reading, loss: Tensor, values: Mapping[tuple[Any, int], Tensor] | None = None
    ) -> tuple[float, ...]:
        """What a micro-batch counts in each term.

        A divisor of 1, or one near zero, may be there to keep an empty sum from being divided by zero
        (`mask.sum().clamp(min=1)`): with a term of exactly zero it counts nothing.

        Args:
            reading: what its loss shows.
            loss: its loss.
            values: the numbers that its step has computed (see `TermValues`), which its terms' own are among: of one
                term alone they are asked for where something without a gradient is added to it.

        Raises:
            UnseenValueError: the value of one of several terms is asked for, and `values` are not there.
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
        """What a micro-batch weighs in each term.

        Args:
            counts: its own.
            totals: the whole batch's; of ranks that have one between them divided by their number.
            main: the share of a term that looks at no row.
            ranks: that number.
        """
        by_law = {Law.SUM: 1.0, Law.OWN: 1.0, Law.SHARED: main}
        return [
            by_law[rule.law] if rule.law in by_law else self._share(index, count, total, ranks)
            for index, (rule, count, total) in enumerate(zip(self.rules, counts, totals, strict=True))
        ]

    def shares_of_nothing(self, *, is_first: bool, kept: float = 0.0) -> list[float]:
        """What a micro-batch weighs in each term where no mean counts anything in the whole batch.

        Sums add up as ever. A term that looks at no row is the batch's in one micro-batch, and so is a mean of
        nothing.

        Args:
            is_first: it is the one.
            kept: what a micro-batch's mean weighs in the batch's, where both have a divisor that is kept from being
                zero, and are no zero themselves.
        """
        once = 1.0 if is_first else 0.0
        by_law = {Law.SUM: 1.0, Law.OWN: 1.0, Law.SHARED: once, Law.MEAN: kept or once}
        return [by_law[rule.law] for rule in self.rules]

    def _share(self, index: int, count: float, total: float, ranks: int) -> float:
        """What a mean weighs in one of which it counts a part; both are divided by their epsilon, too."""
        excess = self.rules[index].excess
        return (count + excess) / (total + excess / ranks) if count and total else 0.0

    @property
    def means(self) -> tuple[int, ...]:
        """The places of the rules whose divisors add up."""
        return tuple(index for index, rule in enumerate(self.rules) if rule.law is Law.MEAN)

    @property
    def looked_up(self) -> frozenset[int]:
        """The places of the rules that are no mean, and whose divisor in the whole batch is looked up."""
        return frozenset(index for index, rule in enumerate(self.rules) if rule.looks_up)

    @property
    def needs_totals(self) -> bool:
        """Whether sums stand beside means: what a mean weighs beside a sum is its share of a total known before.

        Nor do a mean with an epsilon and another term weigh alike.
        """
        has_epsilon = len(self.rules) > 1 and any(rule.excess for rule in self.rules)
        return bool(self.means) and (
            has_epsilon or any(rule.law in (Law.SUM, Law.OWN) for rule in self.rules)
        )


def rounding_of(dtype: torch.dtype) -> float:
    """What a divisor may be off by, relative, in a loss of this dtype."""
    return _ROUNDING.get(dtype, 1e-5)


def share_of(divisor: float, total: float) -> float:
    """What a micro-batch weighs in a sum that the whole batch divides by another number: 1 where by the same."""
    return 1.0 if abs(divisor - total) <= ALIKE * abs(total) else divisor / total


def same_factors(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], dtype: torch.dtype = torch.float32
) -> bool:
    """Whether factors of two micro-batches are equal up to rounding."""
    if len(ours) != len(theirs) or any(a.shape != b.shape for a, b in zip(ours, theirs, strict=True)):
        return False
    allowed = max(rounding_of(kind) for kind in (dtype, *(a.dtype for a in ours)))
    return all(
        float((a.double() - b.double()).norm()) <= allowed * float(a.double().norm())
        for a, b in zip(ours, theirs, strict=True)
    )


def hidden_of(term: LossTerm) -> str:
    """Why a term was not read further."""
    return term.curved or term.opaque


def alike(shares: Sequence[float]) -> bool:
    """Whether a micro-batch weighs the same in all terms: then its loss is scaled, and no term by itself."""
    return max(shares) - min(shares) <= ALIKE * max(abs(share) for share in shares)


def by_name(terms: Sequence[LossTerm]) -> dict[str, list[LossTerm]]:
    """Terms of one name together."""
    named: dict[str, list[LossTerm]] = defaultdict(list)
    for term in terms:
        named[term.name].append(term)
    return named


def difference_of(expected: Any, found: Any) -> str:
    """Which names of terms are new, and which are missing."""
    new, gone = sorted(set(found) - set(expected)), sorted(set(expected) - set(found))
    return "; ".join(
        f"{what} {', '.join(name.lstrip('/') for name in names)}"
        for what, names in (("a new term", new), ("no term", gone))
        if names
    )


def _on_host(numbers: Sequence[Divisor]) -> tuple[float, ...]:
    """Numbers of which some may lie on a device: it is waited for once."""
    held = [number.reshape(()) for number in numbers if isinstance(number, Tensor)]
    known = iter(torch.stack(held).tolist() if held else ())
    return tuple(next(known) if isinstance(number, Tensor) else float(number) for number in numbers)

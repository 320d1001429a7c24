"""How a term of a loss adds up, and what a loss's graph was read as."""

from collections import defaultdict
from collections.abc import Sequence
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
)


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


def on_host(numbers: Sequence[Divisor]) -> tuple[float, ...]:
    """Numbers of which some may lie on a device: it is waited for once."""
    held = [number.reshape(()) for number in numbers if isinstance(number, Tensor)]
    known = iter(torch.stack(held).tolist() if held else ())
    return tuple(next(known) if isinstance(number, Tensor) else float(number) for number in numbers)


ALIKE = 1e-9  # relative: shares that differ by less are the same


_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

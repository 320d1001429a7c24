"""The rule by which a term's micro-batch values make the whole batch's; the reading of one loss's graph."""

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
    Number,
)
from lightning_memkit.micro_batching.graph.term_names import without_source
from lightning_memkit.micro_batching.graph.walk_rules import RULES


class Law(Enum):
    """How a term's divisors in micro-batches relate to its divisor in the whole batch.

    "Looked up" means: a forward of the whole batch without backward reads its divisors (a survey, see
    `Surveys`).
    """

    MEAN = "mean"  # they add up to the whole batch's
    SUM = "sum"  # they are equal to it, and the term is a sum over the rows
    OWN = "own"  # neither: a number of the step's own (the root of a count); the whole batch's is looked up
    SHARED = "shared"  # they are equal, and the term depends on no row (weight decay in the loss)


class UnseenValueError(Exception):
    """A term's value is needed to tell whether it counts anything, but values were not noted."""


@dataclass(frozen=True, kw_only=True)
class TermRule:
    """One term of a loss, and how its micro-batch values make the whole batch's.

    Args:
        name: the term's name in the graph.
        index: which of several terms of that name it is.
        law: how its divisors relate to the whole batch's.
        branch: the node, by name, that adds up the terms that a step computes row by row; None if each term
            counts by itself.
        excess: the epsilon that the step adds to every divisor so that it is not zero.
        fixed: the indices of its factors that do not belong to rows, and so must be equal in all
            micro-batches.
        divided: the step divides it by a number of its own that was 1 in all compared rows: a clamped count,
            or a constant.
        numbered: the step divides or multiplies it by a number of its own.
        aliases: other names that it had in compared rows (see `is_same_sum`).
        source: what tells it from terms of the same graph name (see `source_of`); 0 if nothing has to.
        has_many_sources: the compared micro-batches computed it by different parameters (of an expert, say).
    """

    name: str
    index: int
    law: Law
    branch: str | None = None
    excess: float = 0.0
    fixed: tuple[int, ...] = ()
    divided: bool = False
    numbered: bool = False
    aliases: frozenset[str] = frozenset()
    source: int = 0
    has_many_sources: bool = False

    @property
    def looks_up(self) -> bool:
        """Whether its divisor in the whole batch is looked up.

        For `Law.OWN` this happens in each batch. For `Law.SUM` it ends once the divisor is known to be a
        constant: a divisor that was equal in all compared rows may still be a clamped count.
        """
        return self.law is Law.OWN or (self.law is Law.SUM and self.numbered)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The fields of the terms of a micro-batch's loss (see `LossTerm`), with one entry a rule.

    `multiplied` holds `LossTerm.is_multiplied`, `offset` holds `LossTerm.is_offset`. `factors` are those that
    must be equal in all micro-batches. `missing` are the means that the loss lacks: they count nothing in it.
    `of_one` are the means that have to have one origin in all micro-batches of a batch; None for other terms.
    """

    divisors: tuple[float, ...]
    quotients: tuple[float, ...]
    nodes: tuple[tuple[Any, ...], ...]
    multiplied: tuple[bool, ...] = ()
    averaged: tuple[float, ...] = ()
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
    missing: frozenset[int] = frozenset()
    of_one: tuple[LossTerm | None, ...] = ()

    def is_one(self, index: int) -> bool:
        """Whether the step divides or multiplies a term by 1: a count of one, or a clamped zero."""
        return self.quotients[index] == 1.0 or (
            bool(self.multiplied) and self.multiplied[index] and abs(self.divisors[index] - 1) <= ALIKE
        )

    def own_number(self, index: int) -> float:
        """The size of the step's own number that divides a term: what a clamp keeps from being less."""
        averaged = self.averaged[index] if self.averaged else 1.0
        return abs(self.quotients[index]) or abs(self.divisors[index]) / (averaged or 1.0)

    def is_averaged(self, index: int) -> bool:
        """Whether a term's divisor is more than a number of the step's own: it is a mean as well."""
        return bool(self.averaged) and abs(self.averaged[index] - 1) > ALIKE

    def is_divided(self, index: int) -> bool:
        """Whether the step itself divides a term, or multiplies it by what may be one over a count."""
        return bool(self.quotients[index]) or (bool(self.multiplied) and self.multiplied[index])

    def scales_apart(self, shares: Sequence[float]) -> bool:
        """Whether each term can be scaled by its own share: below a learned factor, shares must be equal."""
        if self.is_crossed:
            return alike(shares)
        of_factors: dict[Any, list[float]] = defaultdict(list)
        for factors, share in zip(self.shared_factors, shares, strict=True):
            for factor in factors:
                of_factors[factor].append(share)
        return all(alike(own) for own in of_factors.values())


def absent(name: str) -> LossTerm:
    """A term that a micro-batch's loss lacks: the step adds it only if rows count in it."""
    nothing = Addend(Number(None), 0.0)
    return LossTerm(name=name, divisor=0.0, nodes=(), bottom=None, top=nothing, summand=nothing)


def rounding_of(dtype: torch.dtype) -> float:
    """The relative rounding error that a divisor may have in a loss of this dtype."""
    return _ROUNDING.get(dtype, 1e-5)


def share_of(divisor: float, total: float) -> float:
    """A micro-batch's share of a sum: its divisor over the whole batch's, exactly 1 if they are equal."""
    return 1.0 if abs(divisor - total) <= ALIKE * abs(total) else divisor / total


def same_factors(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], dtype: torch.dtype = torch.float32
) -> bool:
    """Whether factors of two micro-batches are equal up to rounding."""
    if len(ours) != len(theirs) or any(a.shape != b.shape for a, b in zip(ours, theirs, strict=True)):
        return False
    allowed = max(rounding_of(kind) for kind in (dtype, *(a.dtype for a in ours)))
    return all(
        a.data_ptr() == b.data_ptr()  # one tensor of the module's: no number is read from the device
        or float((a.double() - b.double()).norm()) <= allowed * float(a.double().norm())
        for a, b in zip(ours, theirs, strict=True)
    )


def hidden_of(term: LossTerm) -> str:
    """Why a term could not be read further; empty if it could."""
    return term.curved or term.opaque


def alike(shares: Sequence[float]) -> bool:
    """Whether a micro-batch has the same share of all terms: then its loss is scaled as one number."""
    return max(shares) - min(shares) <= ALIKE * max(abs(share) for share in shares)


def is_same_sum(one: str, other: str) -> bool:
    """Whether two names can be one term's: one is the other and a last node that reduces and scales nothing.

    A walk ends where tensors of rows are added elementwise, and goes on where only one of them has a gradient. Which
    of them have may depend on the rows: `nn.AdaptiveLogSoftmaxWithLoss` adds those of each cluster that has a label.
    """
    (short, of_short), (long, of_long) = sorted(
        map(without_source, (one, other)), key=lambda parts: len(parts[0])
    )
    end = long.removeprefix(f"{short}/")
    is_longer = end != long and "/" not in end and end not in RULES
    return of_short == of_long and (short == long or is_longer)


def difference_of(expected: Any, found: Any) -> str:
    """Describe which names of terms are new, and which are missing."""
    new, gone = sorted(set(found) - set(expected)), sorted(set(expected) - set(found))
    return "; ".join(
        f"{what} {', '.join(name.lstrip('/') for name in names)}"
        for what, names in (("a new term", new), ("no term", gone))
        if names
    )


def on_host(numbers: Sequence[Divisor]) -> tuple[float, ...]:
    """Numbers as floats; those on a device are fetched together, with one synchronization."""
    held = [number.reshape(()) for number in numbers if isinstance(number, Tensor)]
    known = iter(torch.stack(held).tolist() if held else ())
    return tuple(next(known) if isinstance(number, Tensor) else float(number) for number in numbers)


ALIKE = 1e-9  # relative difference below which shares are taken as equal


_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

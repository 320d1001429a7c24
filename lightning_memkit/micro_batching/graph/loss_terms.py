"""The terms of a loss: their divisors, their values, and where their gradients can be scaled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

Divisor = float | Tensor


class Number(NamedTuple):
    """A key for one number that a step computes.

    Args:
        node: the autograd node of the function that computed it.
        output: which of the node's outputs it is.
        element: its index if that output is a vector; None if the output is a single number.
    """

    node: Any
    output: int = 0
    element: int | None = None

    def value(self, values: Mapping[tuple[Any, int], Tensor]) -> Tensor | None:
        """The number's value, looked up in those that `TermValues` noted; None if it isn't among them."""
        value = values.get((self.node, self.output))
        if value is None and hasattr(self.node, "variable"):
            # The node accumulates a parameter's gradient: no function computed the value, so none noted it.
            value = self.node.variable.detach()
        if value is None or (self.element is None and value.numel() != 1):
            return None
        return value.reshape(-1)[self.element or 0]


class Addend(NamedTuple):
    """A number with the factor by which it enters the loss.

    Args:
        number: the number.
        gain: the product of all factors between the number and the loss.
    """

    number: Number
    gain: Divisor

    def value(self, values: Mapping[tuple[Any, int], Tensor], total: Tensor) -> Tensor | None:
        """Number times gain, with the dtype and device of `total`; None if the number isn't known."""
        value = self.number.value(values)
        return None if value is None else value.reshape(()).to(total) * self.gain


class Edge(NamedTuple):
    """An edge of the graph: the gradient along it is one term's, even if other terms share the input.

    Args:
        node: the node that adds terms up.
        index: which of its inputs; None for all of them.
        element: if the input is a vector of losses, the index of the term's.
    """

    node: Any
    index: int | None
    element: int | None = None


@dataclass(frozen=True, kw_only=True)
class LossTerm:
    """One summand of a loss: a sum over the batch, divided by something.

    A term "counts nothing" in a micro-batch that holds none of what it is a mean over (no label, no
    positive).

    Args:
        name: the kinds of the nodes from the loss down to the sum, without additions; equal in all
            micro-batches.
        divisor: what the sum is divided by, up to a constant factor; a 0-dim tensor if it is on a device.
        nodes: the nodes or edges at which this term's gradient alone can be scaled; several if the step adds
            rows up one by one.
        bottom: the node or edge below the term's divisions. If the term counts nothing, its gradient is set
            to zero there, because a division by zero has turned a zero gradient into nan.
        levels: after each named node on the path, its name and the divisor so far.
        branch: the last node on the path, by name, that adds several summands; empty without one.
        quotient: the last number that the step itself divided by, without constant factors; 0 without one.
        is_multiplied: the step has multiplied the term by a number, which may be one over a count.
        averaged: the product of the numbers of elements of the means on the path: the divisor is their product with
            the step's own numbers.
        top: the term's own value in the loss, as a number and its gain.
        summand: the same higher up, after something without a gradient (an entropy of the targets) was added.
        sums: the sums further up in which the term is added to other terms, likewise.
        factors: small tensors of several numbers that scale it between two reductions. Those that do not
            belong to rows must be the same in every micro-batch.
        shared_factor: the node or edge at which a learned factor scales this term and others. All of them are
            scaled there, by one share, so that the factor's own gradient is scaled as well; None without such
            a factor.
        products: edges of the nodes that multiply this term alone by a value computed from parameters. If the
            term counts nothing and is nan, gradients are set to zero there, because 0 times nan is nan.
        shared_products: the same for nodes that multiply it together with other terms.
        is_offset: something without a gradient is added to the term below a learned factor, and so appears in
            that factor's gradient.
        end: the node at which reading stopped.
        below: the edge below which other terms may use the same rows: there its gradient can be scaled alone.
        passed: the nodes that the term's gradient passes after the one where it can be scaled.
        curved: the nonlinear function of a reduced value at which reading stopped; see `LossTerms.curved`.
        opaque: the node that does not show its divisor, at which reading stopped; see `LossTerms.opaque`.
    """

    name: str
    divisor: Divisor
    nodes: tuple[Any, ...]
    bottom: Any
    quotient: Divisor = 0.0
    is_multiplied: bool = False
    averaged: float = 1.0
    levels: tuple[tuple[str, Divisor], ...] = ()
    branch: str = ""
    top: Addend
    summand: Addend
    sums: tuple[Addend, ...] = ()
    factors: tuple[Tensor, ...] = ()
    shared_factor: Any = None
    products: tuple[Edge, ...] = ()
    shared_products: tuple[Edge, ...] = ()
    is_offset: bool = False
    passed: tuple[Any, ...] = ()
    end: Any = None
    below: Edge | None = None
    curved: str = ""
    opaque: str = ""

    @property
    def is_numbered(self) -> bool:
        """Whether the step itself divides or multiplies the term by a number."""
        return self.is_multiplied or isinstance(self.quotient, Tensor) or self.quotient != 0


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """All terms of a loss.

    Args:
        terms: the summands; empty if the graph shows none.
        curved: the nonlinear function that is applied after a reduction, so that the loss is no sum of its
            micro-batches' losses; empty without one. If several terms have one name, the function may be
            applied to each row: then only the terms carry it.
        opaque: the node that does not show what it divides by; empty without one, and if several terms have
            one name.
        is_crossed: a term's gradient passes a node at which another term would be scaled, so all terms must
            have the same share.
        by_column: the terms if each column of a vector of quotients is one; None if the loss has no such vector,
            or if they were not read.
        loss: what they were read from. Before torch 2.13 the node of a function in Python does not outlive its result.
    """

    terms: tuple[LossTerm, ...] = ()
    curved: str = ""
    opaque: str = ""
    is_crossed: bool = False
    by_column: "LossTerms | None" = None
    loss: Tensor | None = field(default=None, repr=False, compare=False)


def collapsed(terms: Sequence[LossTerm], branch: str) -> LossTerm:
    """Merge terms of one name, which a step adds up row by row, into one with their sum's divisor."""
    first = terms[0]
    nodes = tuple(node for term in terms for node in term.nodes)
    above = [divisor for name, divisor in first.levels if f"{branch}/".startswith(f"{name}/")]
    divisor = above[-1] if above else 1.0
    return replace(
        first,
        divisor=divisor,
        nodes=nodes,
        branch=branch,
        quotient=divisor if above else 0.0,  # not the first row's: it may differ from row to row
        is_multiplied=False,
        averaged=1.0,
    )

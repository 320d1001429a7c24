"""What a loss is made of, as its autograd graph shows it: terms, what they add, and where they can be scaled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

Divisor = float | Tensor


class Number(NamedTuple):
    """One number that a step computes, and what it is noted by.

    Args:
        node: what made it.
        output: which of its results.
        element: which number of that vector; None where it is the only one.
    """

    node: Any
    output: int = 0
    element: int | None = None

    def value(self, values: Mapping[tuple[Any, int], Tensor]) -> Tensor | None:
        """The number, of those that a step has computed (see `TermValues`); None where it isn't among them."""
        value = values.get((self.node, self.output))
        if value is None and hasattr(self.node, "variable"):
            # A parameter by itself, which no function has made.
            value = self.node.variable.detach()
        if value is None or (self.element is None and value.numel() != 1):
            return None
        return value.reshape(-1)[self.element or 0]


class Addend(NamedTuple):
    """What a number adds to the loss.

    Args:
        number: which one.
        gain: what the step multiplies it by until it is part of the loss.
    """

    number: Number
    gain: Divisor

    def value(self, values: Mapping[tuple[Any, int], Tensor], total: Tensor) -> Tensor | None:
        """What it adds, of the loss's dtype and on its device; None where the number isn't known."""
        value = self.number.value(values)
        return None if value is None else value.reshape(()).to(total) * self.gain


class Edge(NamedTuple):
    """The way from a node to one of its inputs: the gradient that goes there is this term's, whoever shares the input.

    Args:
        node: what adds terms up.
        index: which of its inputs; None for all of them.
        element: which number of the input, a vector of losses, is the term's.
    """

    node: Any
    index: int | None
    element: int | None = None


@dataclass(frozen=True, kw_only=True)
class LossTerm:
    """One summand of a loss: a sum over the batch, divided by something.

    Args:
        name: the nodes from the loss down to the sum, without those that add; the same term of another micro-batch
            has the same name.
        divisor: what the sum is divided by, up to a constant factor; a 0-dim tensor where a device holds it.
        nodes: where the term's gradient can be scaled for it alone, nodes or edges; several where rows were added up
            one by one.
        bottom: the node or edge below its divisions. Where it counts nothing, its gradient is made zero there: a
            division by zero has made nan of a zero.
        levels: the divisor after each named node on the way.
        branch: the last place on the way where summands came together; empty without one.
        quotient: what the step itself divided by last, without constant factors; 0 without one.
        is_multiplied: the step has multiplied it by a number, which may be one over a count.
        top: the number that is the term's part of the loss, with what it is multiplied by on its way there.
        summand: the same higher up, where what has no gradient (an entropy of the targets) has been added to it.
        sums: the same where it has been added to other terms.
        factors: tensors of several numbers that scale it between two reductions, small ones only. Where they are no
            rows' own, they have to be the same in every micro-batch.
        shared_factor: the node or edge at which a learned factor scales this term and others. They are scaled there,
            all alike, so that the factor's own gradient is scaled as well; None without such a factor.
        products: edges of the nodes that multiply this term alone with what is made of parameters. Where it counts
            nothing and is nan, their gradients are made zero: 0 times nan is nan.
        shared_products: the same of nodes that multiply it together with others.
        is_offset: below a learned factor, whose gradient sees it, something without a gradient is added to it.
        passed: nodes that its gradient passes after the one where it can be scaled.
        curved: the function that bends what was reduced, where the term was not read further; see `LossTerms.curved`.
        opaque: the node that does not show what it divides by, likewise.
    """

    name: str
    divisor: Divisor
    nodes: tuple[Any, ...]
    bottom: Any
    quotient: Divisor = 0.0
    is_multiplied: bool = False
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
    curved: str = ""
    opaque: str = ""

    @property
    def is_numbered(self) -> bool:
        """Whether the step itself divides it, or multiplies it, by a number."""
        return self.is_multiplied or isinstance(self.quotient, Tensor) or self.quotient != 0


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """What the graph behind a loss shows.

    Args:
        terms: the summands; empty where the graph shows none.
        curved: the function that is applied after a reduction, because of which the loss is no sum of its
            micro-batches' losses; empty without one. A function of numbers that the loss has several of may be one
            that is applied to each row: those terms say so, and the loss doesn't.
        opaque: the node that does not show what it divides by; empty without one, and for several as above.
        is_crossed: a term's gradient passes a node at which another one would be scaled: all have to be scaled alike.
    """

    terms: tuple[LossTerm, ...] = ()
    curved: str = ""
    opaque: str = ""
    is_crossed: bool = False


def collapsed(terms: Sequence[LossTerm], branch: str) -> LossTerm:
    """Terms of one name as one: what a step adds up row by row, over what it divides their sum by."""
    first = terms[0]
    nodes = tuple(node for term in terms for node in term.nodes)
    above = [divisor for name, divisor in first.levels if f"{branch}/".startswith(f"{name}/")]
    divisor = above[-1] if above else 1.0
    return replace(
        first,
        divisor=divisor,
        nodes=nodes,
        branch=branch,
        quotient=divisor if above else 0.0,  # those of single rows are no numbers of all
        is_multiplied=False,
    )

"""Read off the autograd graph which sums a loss is made of, and what each is divided by; costs microseconds.

Behind a loss stand a few nodes that add, scale and divide, then the reductions over the batch: `NllLossBackward0`
with the weight of its labels, `DivBackward0` over a `SumBackward0` with its divisor, `MeanBackward0` with its count.
`terms_of` walks from the loss to these reductions and returns each with the scale that it has met. No mode is active,
no operator is patched, and nothing is computed. How rows act on each other below a reduction does not show here.

Source: torch's "Autograd mechanics" (`grad_fn`, `next_functions`, saved tensors).
"""

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import isinf, prod
from typing import Any

import torch
from torch import Tensor, float32, float64
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memkit.micro_batching.graph.graph_nodes import (
    ADDED,
    CURVED,
    MOST_NODES,
    PASSED,
    PRODUCTS,
    factors_below,
    is_number_viewed,
    is_packed,
    kind_of,
    numel_into,
    numel_out,
    of_parameters,
    of_weights,
    shape_into,
    stacks_numbers,
)
from lightning_memkit.micro_batching.graph.loss_terms import (
    Addend,
    Divisor,
    Edge,
    LossTerm,
    LossTerms,
    Number,
)

# Loss functions of torch that reduce by themselves: `_saved_reduction` is 0 (none), 1 (mean) or 2 (sum).
_LOSSES = """BinaryCrossEntropy BinaryCrossEntropyWithLogits HuberLoss MseLoss NllLoss NllLoss2D SmoothL1Loss
    SoftMarginLoss""".split()
_LOSSES_BY_ROW = "MultiMarginLoss MultilabelMarginLoss".split()  # their mean is over rows
_FACTOR_NUMEL = 2**16


@dataclass(slots=True, eq=False)
class _Path:
    """Where a walk stands, and what it has met."""

    node: Any
    output: int
    last: Any  # the node before, or this one where it left other terms
    top: Addend
    summand: Addend
    entry: Any = None  # the first product with a parameter, whose gradient is the term's, too
    is_entered: bool = False
    shared_factor: Any = None  # where that parameter meets other terms as well
    products: tuple[Edge, ...] = ()
    shared_products: tuple[Edge, ...] = ()  # above where it left other terms
    is_offset: bool = False
    passed: tuple[Any, ...] = ()  # nodes below that entry
    edge: Edge | None = None  # where it left the other terms
    is_divided: bool = False  # since then
    name: str = ""
    branch: str = ""
    divisor: Divisor = 1.0
    levels: tuple[tuple[str, Divisor], ...] = ()
    reduced: bool = False
    quotient: Divisor = 0.0
    is_multiplied: bool = False
    gain: Divisor = 1.0  # what the node's number is multiplied with on its way into the loss
    sums: tuple[Addend, ...] = ()
    scaling: tuple[Tensor, ...] = ()  # by several numbers since the last reduction
    factors: tuple[Tensor, ...] = ()
    element: int | None = None  # which number of a vector of losses it follows
    place: Edge | None = None  # where it is alone in that vector

    @classmethod
    def of(cls, loss: Tensor) -> "_Path":
        """A walk that begins at a loss."""
        whole = Addend(Number(loss.grad_fn, loss.output_nr), 1.0)
        return cls(node=loss.grad_fn, output=loss.output_nr, last=loss.grad_fn, top=whole, summand=whole)


def terms_of(loss: Tensor) -> LossTerms:
    """The terms of a loss, read off its graph; nothing is computed, and only the terms' nodes are kept.

    Args:
        loss: a number with a graph behind it.

    Returns:
        The terms. One is `curved` where a function other than a sum, a multiple or a quotient follows a reduction, and
        `opaque` where a custom function or a compiled graph hides its divisor. A function may show it: the context of
        a `torch.autograd.Function` is its node, and an attribute `loss_divisor` of it (a number or a 0-dim tensor) is
        read.
    """
    if loss.grad_fn is None:
        return LossTerms(opaque="a loss without a graph")
    # Under a dispatch mode, the numbers that nodes have saved are handed to operators as Python's, which they refuse.
    with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
        return _walked(loss)


def _walked(loss: Tensor) -> LossTerms:
    terms: dict[Any, LossTerm] = {}
    paths = [_Path.of(loss)]
    visited = 0
    while paths:
        visited += 1
        if visited > MOST_NODES:
            return LossTerms(opaque=f"a loss of more than {MOST_NODES} terms")
        step = _step(paths.pop())
        if isinstance(step, LossTerm):
            _add(terms, step)
        else:
            paths.extend(reversed(step))
    found = tuple(terms.values())
    named = Counter(term.name for term in found)
    lone = [term for term in found if named[term.name] == 1]
    passed = {node for term in found for node in term.passed if node is not term.nodes[0]}
    return LossTerms(
        terms=found,
        curved=next((term.curved for term in lone if term.curved), ""),
        opaque=next((term.opaque for term in lone if term.opaque), ""),
        is_crossed=any(node in passed for term in found for node in term.nodes),
    )


def _step(path: _Path) -> Any:
    """One node further: the ways on from it, or the term that ends here."""
    node, kind = path.node, kind_of(path.node)
    present = [index for index, (child, _) in enumerate(node.next_functions) if child is not None]
    if kind in ADDED:
        return _branched(path, present)
    if path.element is not None and is_number_viewed(node):
        return _branched_vector(path, present, path.element)
    shown = getattr(node, "loss_divisor", None)
    rule = _RULES.get(kind)
    if rule is not None and present and shown is None:
        if kind not in PASSED:
            path.name = f"{path.name}/{kind}"
        return rule(path, present)
    path.name = f"{path.name}/{kind}"
    if shown is not None:
        return _term(_divided(path, shown))
    if kind in ("_DDPSinkBackward", "torch::autograd::CppFunction") and path.output < len(
        node.next_functions
    ):
        return [_down(path, path.output)]
    if kind in ("Select", "Unbind") and present and not factors_below(node.next_functions[0][0]):
        # An index from the end is saved as one without a sign.
        number = path.output if kind == "Unbind" else (node._saved_index + 2**63) % 2**64 - 2**63
        ways = _elements(path, present[0], number)
        if ways is not None:
            return ways
    if path.reduced or of_parameters(node):
        return _term(path)
    if numel_out(node, path.output) == 1:
        if of_weights(node):
            return _term(path)  # a norm of weights: no row is in it
        if kind in CURVED:
            return _term(path, curved=kind.lower())
    return _term(path, opaque=node.name())


def _down(path: _Path, index: int) -> _Path:
    if path.is_entered:
        path.passed = (*path.passed, path.node)
    path.last = path.node
    path.node, path.output = path.node.next_functions[index]
    return path


def _term(path: _Path, *, curved: str = "", opaque: str = "") -> LossTerm:
    bottom = path.last
    if not path.reduced:
        # Other terms may come by what is made of parameters; a division by zero is to stay above the scale elsewhere.
        is_made = of_parameters(path.node) or of_weights(path.node)
        if path.edge is not None and (is_made or not path.is_divided):
            bottom = path.edge
        elif not is_made:
            bottom = path.node
    return LossTerm(
        name=path.name,
        divisor=path.divisor,
        nodes=(path.entry if path.is_entered else bottom,),
        bottom=bottom,
        quotient=path.quotient,
        is_multiplied=path.is_multiplied,
        levels=path.levels,
        branch=path.branch,
        top=path.top,
        summand=path.summand,
        sums=path.sums,
        factors=path.factors,
        shared_factor=path.shared_factor,
        products=path.products,
        shared_products=path.shared_products,
        is_offset=path.is_offset,
        passed=(*path.passed, path.node) if path.is_entered else (),
        curved=curved,
        opaque=opaque,
    )


def _branched(path: _Path, present: list[int]) -> Any:
    """The summands of a sum; a summand without a gradient is none."""
    if not present:
        return _term(path, opaque=path.node.name())
    if path.element is not None:
        return _branched_vector(path, present, path.element)
    if path.reduced and len(present) > 1 and not all(_is_number(path.node, index) for index in present):
        return _term(path)  # rows are added up element by element: one sum, also of a single row
    path.branch = path.name
    if len(present) > 1 and numel_out(path.node, path.output) == 1:
        path.sums = (*path.sums, _addend(path))
    ways = [_down(copy.copy(path), index) for index in present]
    for index, way in zip(present, ways, strict=True):
        if len(present) > 1 or not way.is_entered:
            _share(way)
            way.last = way.node  # what they came together in is not one term's alone
            way.edge, way.is_divided = Edge(path.node, index), False
        way.gain = way.gain * _sign(path.node, index)
        way.is_offset = way.is_offset or (len(present) == 1 and _is_learned(path))
        # Else something is added to the rows of one sum, which may be a single row.
        if numel_into(path.node, index) == 1 and not (path.reduced and len(present) == 1):
            way.top = _addend(way)
            if len(present) > 1:
                way.summand = way.top
    return ways


def _is_learned(path: _Path) -> bool:
    """Whether a learned factor scales what it stands at."""
    return bool(path.is_entered or path.shared_factor or path.products or path.shared_products)


def _is_number(node: Any, index: int) -> bool:
    """Whether an input is a number, or a view of one; a vector of one is a row."""
    child = node.next_functions[index][0]
    return numel_into(node, index) == 1 and (not shape_into(node, index) or is_number_viewed(child))


def _share(path: _Path) -> None:
    """What it has met is several terms'."""
    path.shared_factor = path.shared_factor or (path.entry if path.is_entered else None)
    path.is_entered = False
    path.products, path.shared_products = (), (*path.shared_products, *path.products)


def _addend(path: _Path) -> Addend:
    """What the number at which a walk stands adds to the loss."""
    return Addend(Number(path.node, path.output, path.element), path.gain)


def _sign(node: Any, index: int) -> float:
    """What a sum multiplies one of its summands with."""
    alpha = float(getattr(node, "_saved_alpha", 1))
    signs = {"Add": (1.0, alpha), "Sub": (1.0, -alpha), "Rsub": (-alpha, 1.0)}.get(kind_of(node))
    return 1.0 if signs is None else signs[index]


def _branched_vector(path: _Path, present: list[int], element: int) -> list[_Path]:
    """What one number of a vector of losses is added up from."""
    node, is_stack = path.node, kind_of(path.node) in ("Cat", "Stack") or is_number_viewed(path.node)
    path.branch = path.name
    ways = []
    for index in [element] if is_stack else present:
        if index not in present:
            continue  # a constant among the losses
        way, edge = _down(copy.copy(path), index), Edge(node, index, element)
        if not path.is_entered:  # other ways may come by what is stacked
            way.edge, way.last, way.is_divided = path.place if is_stack else edge, way.node, False
        elif not is_stack and len(present) > 1:
            _share(way)
            way.last, way.edge, way.is_divided = way.node, edge, False
        way.gain = way.gain * _sign(node, index)
        has_constant = len(present) < len(node.next_functions) if is_stack else len(present) == 1
        way.is_offset = way.is_offset or (has_constant and _is_learned(path))
        way.place = edge
        if is_stack:
            way.element = way.place = None
        way.top = way.summand = _addend(way)
        ways.append(way)
    return ways


def _elements(path: _Path, index: int, element: int | None = None) -> list[_Path] | None:
    """The ways to the numbers of a vector of losses, of which it takes one or all; None where it is no such vector."""
    node, shape = path.node, shape_into(path.node, index)
    child = node.next_functions[index][0]
    if path.reduced or path.element is not None or len(shape) != 1 or not stacks_numbers(child, shape[0]):
        return None
    ways = []
    for number in range(shape[0]) if element is None else [element % shape[0]]:
        way = _down(copy.copy(path), index)
        _share(way)
        way.element, way.place = number, Edge(node, index, number)
        way.edge, way.is_divided = way.place, False
        way.name = f"{path.name}/Stack"
        way.top = way.summand = _addend(way)
        ways.append(way)
    return ways


def _passed(path: _Path, present: list[int]) -> Any:
    return [_down(path, present[0])]


def _negated(path: _Path, present: list[int]) -> Any:
    path.gain = -path.gain
    return [_down(path, present[0])]


def _multiplied(path: _Path, present: list[int]) -> Any:
    if len(present) == 2:
        return _product(path, present)
    name = "_saved_other" if present[0] == 0 else "_saved_self"
    factor = _scalar(path, name)
    if factor is None:
        _note_scaling(path, name)
    else:
        path.gain = path.gain * _on_host(factor)
        path = _divided(path, _inverse(factor))
        path.is_multiplied = True
    return [_down(path, present[0])]


def _quotient(path: _Path, present: list[int]) -> Any:
    if 1 in present:
        return _product(path, present)
    divisor, path.is_divided = _scalar(path, "_saved_other"), True
    if divisor is None:
        _note_scaling(path, "_saved_other")
    else:
        path.quotient = _on_host(divisor)
        path.gain = path.gain * _inverse(divisor)
        path = _divided(path, divisor)
    return [_down(path, 0)]


def _product(path: _Path, present: list[int]) -> Any:
    """Two factors with gradients: linear in one where the other is made of parameters alone."""
    if path.reduced or (path.element is None and numel_out(path.node, path.output) != 1):
        return _term(path)
    batched = [index for index in present if not of_parameters(path.node.next_functions[index][0])]
    if not batched:
        return _term(path)
    if len(batched) == 2:
        return _term(path, curved="a product or a quotient of two reductions")
    if kind_of(path.node) == "Div" and batched == [1]:
        return _term(path, curved="a division by a reduction")
    factor = getattr(path.node, "_saved_other" if batched[0] == 0 else "_saved_self", None)
    if isinstance(factor, Tensor):
        factor = _own_number(path, factor)
        path.gain = path.gain * (_inverse(factor) if kind_of(path.node) == "Div" else _on_host(factor))
    path.is_divided = True
    path.products = (*path.products, Edge(path.node, None, path.element))
    if not path.is_entered:
        path.entry, path.is_entered = path.node if path.element is None else path.place, True
    return [_down(path, batched[0])]


def _dotted(path: _Path, present: list[int]) -> Any:
    """A vector of losses times their weights."""
    if len(present) == 2:
        made = [of_parameters(path.node.next_functions[index][0]) for index in present]
        if sum(made) != 1:
            return _term(path)
        ways, index = _elements(path, present[made.index(False)]), present[made.index(False)]
    else:
        index = present[0]
        ways = _elements(path, index)
    if ways is None:
        return _term(path)
    weights = getattr(path.node, "_saved_tensor" if index == 0 else "_saved_self", None)
    for way in ways:
        if isinstance(weights, Tensor):
            way.gain = way.gain * _on_host(_own_number(way, weights))
        if len(present) == 2:
            way.place = Edge(path.node, None, way.element)
            way.entry, way.is_entered = way.place, True
        elif isinstance(weights, Tensor):
            way.factors = (*way.factors, weights.detach())
    return ways


def _own_number(path: _Path, factor: Tensor) -> Tensor:
    """Of what scales a vector of losses, the number that scales the one that is followed."""
    return factor if factor.numel() == 1 or path.element is None else factor.reshape(-1)[path.element]


def _summed(path: _Path, present: list[int]) -> Any:
    path = _leveled(path)
    ways = _elements(path, present[0])
    return [_reduced(_down(path, present[0]))] if ways is None else ways


def _averaged(path: _Path, present: list[int]) -> Any:
    each = numel_into(path.node, present[0]) / max(numel_out(path.node, path.output), 1)
    path.gain = path.gain * _inverse(each)
    path = _divided(path, each)
    ways = _elements(path, present[0])
    return [_down(_reduced(path), present[0])] if ways is None else ways


def _reduced(path: _Path) -> _Path:
    path.factors, path.scaling, path.reduced = (*path.factors, *path.scaling), (), True
    return path


def _reduced_by_itself(path: _Path, present: list[int]) -> LossTerm:
    """A loss function of torch's with a reduction of its own."""
    kind = kind_of(path.node)
    if path.node._saved_reduction != 1:
        return _term(path)
    if kind in ("NllLoss", "NllLoss2D"):
        return _term(_divided(path, path.node._saved_total_weight))
    shape = shape_into(path.node, present[0])
    return _term(_divided(path, float(shape[0]) if kind in _LOSSES_BY_ROW else float(prod(shape))))


_RULES: dict[str, Callable[[_Path, list[int]], Any]] = {
    **dict.fromkeys(PASSED, _passed),
    "Neg": _negated,
    "Mul": _multiplied,
    "Div": _quotient,
    "Sum": _summed,
    "Nansum": _summed,
    "Mean": _averaged,
    **dict.fromkeys((*_LOSSES, *_LOSSES_BY_ROW), _reduced_by_itself),
    **dict.fromkeys(PRODUCTS, lambda path, present: _term(path)),
    "Dot": _dotted,
}


def _leveled(path: _Path) -> _Path:
    path.levels = (*path.levels, (path.name, path.divisor))
    return path


def _divided(path: _Path, by: Divisor) -> _Path:
    path.divisor = path.divisor * _on_host(by)
    return _leveled(path)


def _on_host(number: Divisor) -> Divisor:
    """A number, in double precision; one that lies on a device stays there, where waiting for it would cost time."""
    if not isinstance(number, Tensor):
        return number
    if number.device.type == "cpu":
        return float(number.item())
    return number.detach().to(float32 if number.device.type == "mps" else float64)


def _inverse(factor: Divisor) -> Divisor:
    factor = _on_host(factor)
    if isinstance(factor, Tensor):
        return factor.reciprocal()
    return 1.0 / factor if factor else float("inf")


def _scalar(path: _Path, name: str) -> "Divisor | None":
    """The number that a node has saved; None where it is a tensor of several, which scales row by row."""
    raw = getattr(path.node, f"_raw{name}", None)
    is_large = numel_out(path.node, path.output) != 1 and path.element is None
    if raw is not None and is_packed(raw) and is_large:
        return None  # unpacking may bring a large tensor back from the host, or run a forward again
    value = getattr(path.node, name)
    if isinstance(value, Tensor):
        if path.element is not None:
            return value if value.numel() == 1 and value.ndim == 0 else None
        # Of one row, what scales row by row is one number, too: below a reduction it has a dimension.
        by_row = path.reduced and value.ndim > 0 and numel_out(path.node, path.output) == 1
        return value if value.numel() == 1 and not by_row else None
    return None if value is None else float(value)


def _note_scaling(path: _Path, name: str) -> None:
    """Keep several numbers that scale what was reduced: another reduction may lie below."""
    if path.element is not None:
        value = getattr(path.node, name).detach()
        number = _on_host(_own_number(path, value))
        path.gain = path.gain * (_inverse(number) if kind_of(path.node) == "Div" else number)
        path.factors = (*path.factors, value)
        return
    raw = getattr(path.node, f"_raw{name}", None)
    if not path.reduced or is_packed(raw):
        return
    value = getattr(path.node, name)
    if isinstance(value, Tensor) and value.numel() <= _FACTOR_NUMEL:
        path.scaling = (*path.scaling, value.detach())


def _add(terms: dict[Any, LossTerm], term: LossTerm) -> None:
    """A term that counts nothing is none; one that the loss adds several times is one."""
    if isinstance(term.divisor, float) and isinf(term.divisor):
        return
    node = term.nodes[0]
    if node in terms:
        term = replace(term, divisor=_inverse(_inverse(terms[node].divisor) + _inverse(term.divisor)))
    terms[node] = term

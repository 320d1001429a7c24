"""How a walk continues at each kind of node: sums, products and quotients, reductions, vectors of losses.

A rule takes the path and the indices of the inputs that have a gradient (`present`). It returns the paths to
continue on, or the term at which the walk ends.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor

from lightning_memkit.micro_batching.graph.graph_nodes import (
    PASSED,
    PRODUCTS,
    column_divisor,
    divides_columns,
    is_number_viewed,
    kind_of,
    numel_into,
    numel_out,
    of_parameters,
    reduces_rows,
    shape_into,
    stacks_numbers,
)
from lightning_memkit.micro_batching.graph.loss_terms import (
    Edge,
    LossTerm,
)
from lightning_memkit.micro_batching.graph.term_names import COLUMN
from lightning_memkit.micro_batching.graph.walk_path import (
    WalkPath,
    addend,
    divided,
    down,
    ended_term,
    in_double,
    inverse,
    is_learned,
    is_number,
    leveled,
    note_scaling,
    own_number,
    scalar,
    share,
    sign_of,
)

# torch's loss functions with a reduction of their own: `_saved_reduction` is 0 (none), 1 (mean) or 2 (sum).
_LOSSES = """BinaryCrossEntropy BinaryCrossEntropyWithLogits HuberLoss MseLoss NllLoss NllLoss2D SmoothL1Loss
    SoftMarginLoss""".split()


_WEIGHTS = ("weight", "pos_weight")  # that these functions save
_LOSSES_BY_ROW = "MultiMarginLoss MultilabelMarginLoss".split()  # their mean is over rows


def branched(path: WalkPath, present: list[int]) -> Any:
    """The paths to the summands of a sum that have a gradient."""
    if not present:
        return ended_term(path, opaque=path.node.name())
    if path.element is not None:
        return branched_vector(path, present, path.element)
    if path.reduced and len(present) > 1 and not all(is_number(path.node, index) for index in present):
        return ended_term(path)  # tensors of rows are added elementwise: still one reduced sum
    path.branch = path.name
    if len(present) > 1 and numel_out(path.node, path.output) == 1:
        path.sums = (*path.sums, addend(path))
    ways = [down(copy.copy(path), index) for index in present]
    for index, way in zip(present, ways, strict=True):
        if len(present) > 1 or not way.is_entered:
            share(way)
            way.last = way.node  # the sum itself belongs to several terms: one can't be scaled at it
            way.edge, way.is_divided = Edge(path.node, index), False
        way.gain = way.gain * sign_of(path.node, index)
        way.is_offset = way.is_offset or (len(present) == 1 and is_learned(path))
        # Otherwise something is added to the rows below a reduction, of which there may be only one.
        if numel_into(path.node, index) == 1 and not (path.reduced and len(present) == 1):
            way.top = addend(way)
            if len(present) > 1:
                way.summand = way.top
    return ways


def branched_vector(path: WalkPath, present: list[int], element: int) -> list[WalkPath]:
    """The paths to the summands of one element of a vector of losses."""
    node, is_stack = path.node, kind_of(path.node) in ("Cat", "Stack") or is_number_viewed(path.node)
    path.branch = path.name
    ways = []
    for index in [element] if is_stack else present:
        if index not in present:
            continue  # the element is a constant, without a gradient
        way, edge = down(copy.copy(path), index), Edge(node, index, element)
        if not path.is_entered:  # the stacked scalar may be used elsewhere, too: scale on the edge
            way.edge, way.last, way.is_divided = path.place if is_stack else edge, way.node, False
        elif not is_stack and len(present) > 1:
            share(way)
            way.last, way.edge, way.is_divided = way.node, edge, False
        way.gain = way.gain * sign_of(node, index)
        has_constant = len(present) < len(node.next_functions) if is_stack else len(present) == 1
        way.is_offset = way.is_offset or (has_constant and is_learned(path))
        way.place = edge
        if is_stack:
            way.element = way.place = None
        way.top = way.summand = addend(way)
        ways.append(way)
    return ways


def elements(path: WalkPath, index: int, element: int | None = None) -> list[WalkPath] | None:
    """The paths to one element, or all, of an input that is a vector of losses; None if it is none."""
    node, shape = path.node, shape_into(path.node, index)
    child = node.next_functions[index][0]
    if path.reduced or path.element is not None or len(shape) != 1:
        return None
    kind = "Stack" if stacks_numbers(child, shape[0]) else COLUMN
    if kind == COLUMN and not (path.by_column and divides_columns(child, shape[0])):
        return None
    ways = []
    for number in range(shape[0]) if element is None else [element % shape[0]]:
        way = down(copy.copy(path), index)
        share(way)
        way.element, way.place = number, Edge(node, index, number)
        way.edge, way.is_divided = way.place, False
        way.name = f"{path.name}/{kind}"
        way.top = way.summand = addend(way)
        ways.append(way)
    return ways


def _passed(path: WalkPath, present: list[int]) -> Any:
    last = path.last
    path = down(path, present[0])
    if path.reduced:
        path.last = (
            last  # other reductions may share the view: at the node above it, this term's gradient is alone
        )
    return [path]


def _negated(path: WalkPath, present: list[int]) -> Any:
    path.gain = -path.gain
    return [down(path, present[0])]


def _multiplied(path: WalkPath, present: list[int]) -> Any:
    if len(present) == 2:
        return _product(path, present)
    name = "_saved_other" if present[0] == 0 else "_saved_self"
    factor = scalar(path, name)
    if factor is None:
        column = _column(path, present[0])
        if column is not None:
            return column
        note_scaling(path, name)
    else:
        path.gain = path.gain * in_double(factor)
        path = divided(path, inverse(factor))
        path.is_multiplied = True
    return [down(path, present[0])]


def _quotient(path: WalkPath, present: list[int]) -> Any:
    if 1 in present:
        return _product(path, present)
    divisor, path.is_divided = scalar(path, "_saved_other"), True
    if divisor is None:
        column = _column(path, 0)
        if column is not None:
            return column
        note_scaling(path, "_saved_other")
    else:
        path.quotient = in_double(divisor)
        path.gain = path.gain * inverse(divisor)
        path = divided(path, divisor)
    return [down(path, 0)]


def _column(path: WalkPath, index: int) -> LossTerm | None:
    """One column of a vector of quotients: its gradient is scaled above the reduction, on the edge to it."""
    if not path.by_column or path.element is None or not reduces_rows(path.node.next_functions[index][0]):
        return None
    vector = column_divisor(path.node, index, numel_out(path.node, path.output))
    if vector is None:
        return None
    divisor = own_number(path, vector)
    path.quotient = in_double(divisor)
    path.gain = path.gain * inverse(divisor)
    path = divided(path, divisor)
    path.last, path.reduced = Edge(path.node, index, path.element), True
    path.node, path.output = path.node.next_functions[index]
    path.name = f"{path.name}/{kind_of(path.node)}"
    if kind_of(path.node) == "Mean":
        path = _divided_by_mean(path, 0)
    return ended_term(path)


def _product(path: WalkPath, present: list[int]) -> Any:
    """Both operands have gradients: linear in one if the other is computed from parameters only."""
    if path.reduced or (path.element is None and numel_out(path.node, path.output) != 1):
        return ended_term(path)
    batched = [index for index in present if not of_parameters(path.node.next_functions[index][0])]
    if not batched:
        return ended_term(path)
    if len(batched) == 2:
        return ended_term(path, curved="a product or a quotient of two reductions")
    if kind_of(path.node) == "Div" and batched == [1]:
        return ended_term(path, curved="a division by a reduction")
    factor = getattr(path.node, "_saved_other" if batched[0] == 0 else "_saved_self", None)
    if isinstance(factor, Tensor):
        factor = own_number(path, factor)
        path.gain = path.gain * (inverse(factor) if kind_of(path.node) == "Div" else in_double(factor))
    path.is_divided = True
    path.products = (*path.products, Edge(path.node, None, path.element))
    if not path.is_entered:
        path.entry, path.is_entered = path.node if path.element is None else path.place, True
    return [down(path, batched[0])]


def _dotted(path: WalkPath, present: list[int]) -> Any:
    """A dot product of a vector of losses with their weights."""
    if len(present) == 2:
        made = [of_parameters(path.node.next_functions[index][0]) for index in present]
        if sum(made) != 1:
            return ended_term(path)
        ways, index = elements(path, present[made.index(False)]), present[made.index(False)]
    else:
        index = present[0]
        ways = elements(path, index)
    if ways is None:
        return ended_term(path)
    weights = getattr(path.node, "_saved_tensor" if index == 0 else "_saved_self", None)
    for way in ways:
        if isinstance(weights, Tensor):
            way.gain = way.gain * in_double(own_number(way, weights))
        if len(present) == 2:
            way.place = Edge(path.node, None, way.element)
            way.entry, way.is_entered = way.place, True
        elif isinstance(weights, Tensor):
            way.factors = (*way.factors, weights.detach())
    return ways


def _summed(path: WalkPath, present: list[int]) -> Any:
    path = leveled(path)
    ways = elements(path, present[0])
    return [_reduced(down(path, present[0]))] if ways is None else ways


def _averaged(path: WalkPath, present: list[int]) -> Any:
    path = _divided_by_mean(path, present[0])
    ways = elements(path, present[0])
    return [down(_reduced(path), present[0])] if ways is None else ways


def _divided_by_mean(path: WalkPath, index: int) -> WalkPath:
    each = numel_into(path.node, index) / max(numel_out(path.node, path.output), 1)
    path.gain, path.averaged = path.gain * inverse(each), path.averaged * each
    return divided(path, each)


def _reduced(path: WalkPath) -> WalkPath:
    path.factors, path.scaling, path.reduced = (*path.factors, *path.scaling), (), True
    return path


def _reduced_by_itself(path: WalkPath, present: list[int]) -> LossTerm:
    """One of torch's loss functions with a reduction of its own."""
    kind = kind_of(path.node)
    for name in _WEIGHTS:  # of classes, say: computed from the batch, they make its rows act on each other
        weight = getattr(path.node, f"_saved_{name}", None)
        if weight is not None:
            path.name, path.factors = f"{path.name}/{name}", (*path.factors, weight)
    if path.node._saved_reduction != 1:
        return ended_term(path)
    if kind in ("NllLoss", "NllLoss2D"):
        term = ended_term(divided(path, path.node._saved_total_weight))
        # The node divides by the weight of its labels, which may be 0: zeros have to be made below it.
        return replace(term, bottom=Edge(path.node, present[0]))
    shape = shape_into(path.node, present[0])
    return ended_term(divided(path, float(shape[0]) if kind in _LOSSES_BY_ROW else float(prod(shape))))


RULES: dict[str, Callable[[WalkPath, list[int]], Any]] = {
    **dict.fromkeys(PASSED, _passed),
    "Neg": _negated,
    "Mul": _multiplied,
    "Div": _quotient,
    "Sum": _summed,
    "Nansum": _summed,
    "Mean": _averaged,
    **dict.fromkeys((*_LOSSES, *_LOSSES_BY_ROW), _reduced_by_itself),
    **dict.fromkeys(PRODUCTS, lambda path, present: ended_term(path)),
    "Dot": _dotted,
}

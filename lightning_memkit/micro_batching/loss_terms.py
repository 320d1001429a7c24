"""Read off the autograd graph which sums a loss is made of, and what each is divided by; costs microseconds.

Behind a loss stand a few nodes that add, scale and divide, then the reductions over the batch: `NllLossBackward0`
with the weight of its labels, `DivBackward0` over a `SumBackward0` with its divisor, `MeanBackward0` with its count.
`terms_of` walks from the loss to these reductions and returns each with the scale that it has met. No mode is active,
no operator is patched, and nothing is computed. How rows act on each other below a reduction does not show here.

Source: torch's "Autograd mechanics" (`grad_fn`, `next_functions`, saved tensors).
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import isinf, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, float32, float64, nn
from torch.utils._python_dispatch import _disable_current_modes

MOST_NODES = 4096  # of a loss that a step adds up row by row; one of more shows nothing

Divisor = float | Tensor

# What hands a value on as it is, in any shape: its first input is its only one.
_PASSED = """Alias Clone Contiguous MaskedFill Permute ReshapeAlias Squeeze T ToCopy Transpose Unsqueeze UnsafeView
    View""".split()
_ADDED = "Add Cat Rsub Stack Sub".split()
# Loss functions of torch that reduce by themselves: `_saved_reduction` is 0 (none), 1 (mean) or 2 (sum).
_LOSSES = """BinaryCrossEntropy BinaryCrossEntropyWithLogits HuberLoss MseLoss NllLoss NllLoss2D SmoothL1Loss
    SoftMarginLoss""".split()
_LOSSES_BY_ROW = "MultiMarginLoss MultilabelMarginLoss".split()  # their mean is over rows
_PRODUCTS = "Addmv Bmm Dot Mm Mv".split()  # with a constant they are sums
# Functions of one number that are no multiple of it.
_CURVED = """Abs Acos Asin Atan Clamp ClampMax ClampMin Cos Cosh Elu Erf Exp Exp2 Expm1 Gelu LeakyRelu LinalgVectorNorm
    Log Log10 Log1P Log2 LogSigmoid Logaddexp Logsumexp Max Maximum Min Minimum Norm Pow Prod Reciprocal Relu Rsqrt
    Sigmoid Silu Sin Sinh Softplus Sqrt Std Tan Tanh Var""".split()
# What stands between a number and the parameter that it is made of: a learned temperature, the weight of a task.
_OF_PARAMETERS = {
    *_PASSED,
    *_CURVED,
    *_ADDED,
    *"Div Index LogSoftmax Mean Mul Neg Select Slice Softmax Split SplitWithSizes Sum Unbind".split(),
}
_PARAMETER_NUMEL = 64  # such numbers stand in a small parameter
# What stands between a penalty and the weights that it is made of, whatever their size; nothing that takes indices.
_OF_WEIGHTS = {
    *_PASSED,
    *_CURVED,
    *_ADDED,
    *_PRODUCTS,
    *"""Amax Amin Cumsum Diagonal Div LinalgSvd Mean Mul Neg Select
    Slice Split SplitWithSizes Stack Sum Trace Tril Triu Unbind""".split(),
} - {"MaskedFill"}
_FACTOR_NUMEL = 2**16
_LEAF = "torch::autograd::AccumulateGrad"


@dataclass(frozen=True, kw_only=True)
class Term:
    """One summand of a loss: a sum over the batch, divided by something.

    Args:
        name: the nodes from the loss down to the sum, without those that add; the same term of another micro-batch
            has the same name.
        divisor: what the sum is divided by, up to a constant factor; a 0-dim tensor where a device holds it.
        nodes: where the term's gradient can be scaled for it alone, nodes or edges; several where rows were added up
            one by one.
        levels: the divisor after each named node on the way.
        branch: the last place on the way where summands came together; empty without one.
        quotient: what the step itself divided by last, without constant factors; 0 without one.
        top: the node whose number is the term's part of the loss, times `gain`.
        gain: see `top`.
        summand: the same higher up, where what has no gradient (an entropy of the targets) has been added to it.
        summand_gain: see `summand`.
        factors: tensors of several numbers that scale it between two reductions, small ones only. Where they are no
            rows' own, they have to be the same in every micro-batch.
        shared_factor: where a learned factor scales several terms at once, whose shares then have to be alike: its own
            gradient is not to be scaled for each. Where a term's gradient passes another's node, that is all terms.
        passed: nodes that its gradient passes after the one where it can be scaled.
    """

    name: str
    divisor: Divisor
    nodes: tuple[Any, ...]
    quotient: Divisor = 0.0
    levels: tuple[tuple[str, Divisor], ...] = ()
    branch: str = ""
    top: Any = None
    gain: Divisor = 1.0
    summand: Any = None
    summand_gain: Divisor = 1.0
    factors: tuple[Tensor, ...] = ()
    shared_factor: Any = None
    passed: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """What the graph behind a loss shows.

    Args:
        terms: the summands; empty where the graph shows none.
        curved: the function that is applied after a reduction, because of which the loss is no sum of its
            micro-batches' losses; empty without one.
        opaque: the node that does not show what it divides by; empty without one.
    """

    terms: tuple[Term, ...] = ()
    curved: str = ""
    opaque: str = ""


class Edge(NamedTuple):
    """The way from a node to one of its inputs: the gradient that goes there is this term's, whoever shares the input.

    Args:
        node: what adds terms up.
        index: which of them.
    """

    node: Any
    index: int


class _Path:
    """Where a walk stands, and what it has met."""

    __slots__ = (
        "node",
        "output",
        "entry",
        "is_entered",
        "shared_factor",
        "passed",
        "edge",
        "name",
        "divisor",
        "levels",
        "branch",
        "reduced",
        "quotient",
        "gain",
        "top",
        "top_gain",
        "summand",
        "summand_gain",
        "scaling",
        "factors",
    )

    def __init__(self, node: Any, output: int) -> None:
        self.node, self.output = node, output
        self.entry = node  # the last node that was linear: only this term's gradient passes it
        self.is_entered = False  # a parameter has met it there: its gradient is the term's, too
        self.shared_factor: Any = None  # where that parameter meets other terms as well
        self.passed: tuple[Any, ...] = ()  # nodes below that entry
        self.edge: Edge | None = (
            None  # where it left the other terms, while nothing was divided or reduced since
        )
        self.name, self.branch = "", ""
        self.divisor: Divisor = 1.0
        self.levels: tuple[tuple[str, Divisor], ...] = ()
        self.reduced = False
        self.quotient: Divisor = 0.0
        self.gain: Divisor = 1.0  # what the node's number is multiplied with on its way into the loss
        self.top = node
        self.top_gain: Divisor = 1.0
        self.summand = node
        self.summand_gain: Divisor = 1.0
        self.scaling: tuple[Tensor, ...] = ()  # by several numbers since the last reduction
        self.factors: tuple[Tensor, ...] = ()


class _CurvedLossError(Exception):
    """The loss bends what it has reduced."""


_Step = "list[_Path] | Term | str"  # the ways on, or the term that ends here, or the node that shows nothing


def terms_of(loss: Tensor) -> LossTerms:
    """The terms of a loss, read off its graph; nothing is computed, and only the terms' nodes are kept.

    Args:
        loss: a number with a graph behind it.

    Returns:
        The terms; or `curved`, where a function other than a sum, a multiple or a quotient follows a reduction; or
        `opaque`, where a custom function or a compiled graph hides its divisor. A function may show it: the context of
        a `torch.autograd.Function` is its node, and an attribute `loss_divisor` of it (a number or a 0-dim tensor) is
        read.
    """
    if loss.grad_fn is None:
        return LossTerms(opaque="a loss without a graph")
    # Under a dispatch mode, the numbers that nodes have saved are handed to operators as Python's, which they refuse.
    with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
        return _walked(loss)


def _walked(loss: Tensor) -> LossTerms:
    terms: dict[Any, Term] = {}
    paths = [_Path(loss.grad_fn, loss.output_nr)]
    visited = 0
    try:
        while paths:
            visited += 1
            if visited > MOST_NODES:
                return LossTerms(opaque=f"a loss of more than {MOST_NODES} terms")
            step = _step(paths.pop())
            if isinstance(step, str):
                return LossTerms(opaque=step)
            if isinstance(step, Term):
                _add(terms, step)
            else:
                paths.extend(reversed(step))
    except _CurvedLossError as error:
        return LossTerms(curved=str(error))
    found = tuple(terms.values())
    passed = {node for term in found for node in term.passed if node is not term.nodes[0]}
    crossed = next((node for term in found for node in term.nodes if node in passed), None)
    if crossed is not None:
        found = tuple(replace(term, shared_factor=crossed) for term in found)
    return LossTerms(terms=found)


def collapsed(terms: Sequence[Term], branch: str) -> Term:
    """Terms of one name as one: what a step adds up row by row, over what it divides their sum by."""
    first = terms[0]
    nodes = tuple(node for term in terms for node in term.nodes)
    return replace(first, divisor=dict(first.levels).get(branch, 1.0), nodes=nodes, branch=branch)


def kind_of(node: Any) -> str:
    """The function that a node differentiates: `Sum` for `SumBackward0`; custom functions keep their name."""
    kind = _KINDS.get(type(node))
    if kind is None:
        name = node.name()
        stem, found, version = name.rpartition("Backward")
        kind = stem if found and version.isdigit() else name
        # Classes of torch's own nodes live for ever; those of user's functions need not.
        if kind in _RULES or kind in _ADDED:
            _KINDS[type(node)] = kind
    return kind


def _step(path: _Path) -> Any:
    """One node further."""
    node, kind = path.node, kind_of(path.node)
    present = [index for index, (child, _) in enumerate(node.next_functions) if child is not None]
    if kind in _ADDED:
        return _branched(path, present)
    shown = getattr(node, "loss_divisor", None)
    rule = _RULES.get(kind)
    if rule is not None and present and shown is None:
        if kind not in _PASSED:
            path.name = f"{path.name}/{kind}"
        return rule(path, present)
    path.name = f"{path.name}/{kind}"
    if shown is not None:
        return _term(_divided(path, shown))
    if kind in ("_DDPSinkBackward", "torch::autograd::CppFunction") and path.output < len(
        node.next_functions
    ):
        return [_down(path, path.output)]
    if path.reduced or _of_parameters(node):
        return _term(path)
    if _numel_out(path) == 1 and _of_weights(node):
        return _term(path)  # a norm of weights: no row is in it
    if kind in _CURVED and _numel_out(path) == 1:
        raise _CurvedLossError(kind.lower())
    return node.name()


def _down(path: _Path, index: int) -> _Path:
    if path.is_entered:
        path.passed = (*path.passed, path.node)
    else:
        path.entry = path.node
    path.node, path.output = path.node.next_functions[index]
    return path


def _term(path: _Path) -> Term:
    if not path.reduced and not path.is_entered:
        path.entry = path.node if path.edge is None else path.edge
    return Term(
        name=path.name,
        divisor=path.divisor,
        nodes=(path.entry,),
        quotient=path.quotient,
        levels=path.levels,
        branch=path.branch,
        top=path.top,
        gain=path.top_gain,
        summand=path.summand,
        summand_gain=path.summand_gain,
        factors=path.factors,
        shared_factor=path.shared_factor,
        passed=(*path.passed, path.node) if path.is_entered else (),
    )


def _branched(path: _Path, present: list[int]) -> Any:
    """The summands of a sum; a summand without a gradient is none."""
    if not present:
        return path.node.name()
    if path.reduced and len(present) > 1 and any(_numel_in(path, index) != 1 for index in present):
        return _term(path)  # rows are added up element by element: one sum
    path.branch = path.name
    kind, alpha = kind_of(path.node), float(getattr(path.node, "_saved_alpha", 1))
    ways = [_down(copy.copy(path), index) for index in present]
    for index, way in zip(present, ways, strict=True):
        if len(present) > 1 or not way.is_entered:
            way.shared_factor = path.entry if path.is_entered else path.shared_factor
            way.entry, way.is_entered = way.node, False  # what they came together in is not one term's alone
        signs = {"Add": (1.0, alpha), "Sub": (1.0, -alpha), "Rsub": (-alpha, 1.0)}.get(kind)
        way.edge = None if path.is_entered else Edge(path.node, index)
        way.gain = way.gain * (1.0 if signs is None else signs[min(index, 1)])
        # Else something is added to the rows of one sum, which may be a single row.
        if _numel_in(path, index) == 1 and not (path.reduced and len(present) == 1):
            way.top, way.top_gain = way.node, way.gain
            if len(present) > 1:
                way.summand, way.summand_gain = way.node, way.gain
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
    return [_down(path, present[0])]


def _quotient(path: _Path, present: list[int]) -> Any:
    if 1 in present:
        return _product(path, present)
    divisor, path.edge = _scalar(path, "_saved_other"), None
    if divisor is None:
        _note_scaling(path, "_saved_other")
    else:
        path.quotient = _on_host(divisor)
        path.gain = path.gain * _inverse(divisor)
        path = _divided(path, divisor)
    return [_down(path, 0)]


def _product(path: _Path, present: list[int]) -> Any:
    """Two factors with gradients: linear in one where the other is made of parameters alone."""
    if path.reduced or _numel_out(path) != 1:
        return _term(path)
    batched = [index for index in present if not _of_parameters(path.node.next_functions[index][0])]
    if not batched:
        return _term(path)
    if len(batched) == 2:
        raise _CurvedLossError("a product or a quotient of two reductions")
    if kind_of(path.node) == "Div" and batched == [1]:
        raise _CurvedLossError("a division by a reduction")
    factor = getattr(path.node, "_saved_other" if batched[0] == 0 else "_saved_self", None)
    if isinstance(factor, Tensor):
        path.gain = path.gain * (_inverse(factor) if kind_of(path.node) == "Div" else _on_host(factor))
    path.edge = None
    if not path.is_entered:
        path.entry, path.is_entered = path.node, True
    return [_down(path, batched[0])]


def _summed(path: _Path, present: list[int]) -> Any:
    path = _down(_leveled(path), present[0])
    return [_reduced(path)]


def _averaged(path: _Path, present: list[int]) -> Any:
    each = _numel_in(path, present[0]) / max(_numel_out(path), 1)
    path.gain = path.gain * _inverse(each)
    path = _divided(path, each)
    return [_down(_reduced(path), present[0])]


def _reduced(path: _Path) -> _Path:
    path.factors, path.scaling, path.reduced = (*path.factors, *path.scaling), (), True
    return path


def _reduced_by_itself(path: _Path, present: list[int]) -> Term:
    """A loss function of torch's with a reduction of its own."""
    kind = kind_of(path.node)
    if path.node._saved_reduction != 1:
        return _term(path)
    if kind in ("NllLoss", "NllLoss2D"):
        return _term(_divided(path, path.node._saved_total_weight))
    shape = _shape_in(path, present[0])
    return _term(_divided(path, float(shape[0]) if kind in _LOSSES_BY_ROW else float(prod(shape))))


_RULES: dict[str, Callable[[_Path, list[int]], Any]] = {
    **dict.fromkeys(_PASSED, _passed),
    "Neg": _negated,
    "Mul": _multiplied,
    "Div": _quotient,
    "Sum": _summed,
    "Nansum": _summed,
    "Mean": _averaged,
    **dict.fromkeys((*_LOSSES, *_LOSSES_BY_ROW), _reduced_by_itself),
    **dict.fromkeys(_PRODUCTS, lambda path, present: _term(path)),
}
_KINDS: dict[type, str] = {}


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
    if raw is not None and getattr(raw, "unpack_hook", None) is not None and _numel_out(path) != 1:
        return None  # unpacking may bring a large tensor back from the host, or run a forward again
    value = getattr(path.node, name)
    if isinstance(value, Tensor):
        # Of one row, what scales row by row is one number, too: below a reduction it has a dimension.
        by_row = path.reduced and value.ndim > 0 and _numel_out(path) == 1
        return value if value.numel() == 1 and not by_row else None
    return None if value is None else float(value)


def _note_scaling(path: _Path, name: str) -> None:
    """Keep several numbers that scale what was reduced: another reduction may lie below."""
    raw = getattr(path.node, f"_raw{name}", None)
    if not path.reduced or getattr(raw, "unpack_hook", None) is not None:
        return
    value = getattr(path.node, name)
    if isinstance(value, Tensor) and value.numel() <= _FACTOR_NUMEL:
        path.scaling = (*path.scaling, value.detach())


def _shape_in(path: _Path, index: int) -> Sequence[int]:
    child, output = path.node.next_functions[index]
    return child._input_metadata[output].shape


def _numel_in(path: _Path, index: int) -> int:
    return prod(_shape_in(path, index))


def _numel_out(path: _Path) -> int:
    return prod(path.node._input_metadata[path.output].shape)


def _of_parameters(node: Any) -> bool:
    """Whether a number is computed from a small parameter alone, by functions of one number."""
    nodes = [node]
    for _ in range(64):
        if not nodes:
            return True
        current = nodes.pop()
        if current.name() != _LEAF and kind_of(current) not in _OF_PARAMETERS:
            return False
        if prod(current._input_metadata[0].shape) > _PARAMETER_NUMEL:
            return False
        nodes.extend(child for child, _ in current.next_functions if child is not None)
    return False


def _of_weights(node: Any) -> bool:
    """Whether a number is computed from parameters alone: a penalty, of which all micro-batches have the same."""
    nodes, seen = [node], {node}
    while nodes:
        current = nodes.pop()
        if current.name() == _LEAF:
            if not isinstance(current.variable, nn.Parameter):
                return False
            continue
        kind = kind_of(current)
        if kind not in _OF_WEIGHTS or len(seen) > MOST_NODES:
            return False
        children = [child for child, _ in current.next_functions]
        if None in children and kind not in _ADDED and not _by_number(current, children.index(None)):
            return False
        new = {child for child in children if child is not None} - seen
        seen |= new
        nodes.extend(new)
    return True


def _by_number(node: Any, index: int) -> bool:
    """Whether what has no gradient in a product or a quotient is one number."""
    value = getattr(node, "_saved_other" if index else "_saved_self", None)
    return isinstance(value, Tensor) and value.numel() == 1


def _add(terms: dict[Any, Term], term: Term) -> None:
    """A term that counts nothing is none; one that the loss adds several times is one."""
    if isinstance(term.divisor, float) and isinf(term.divisor):
        return
    node = term.nodes[0]
    if node in terms:
        term = replace(term, divisor=_inverse(_inverse(terms[node].divisor) + _inverse(term.divisor)))
    terms[node] = term

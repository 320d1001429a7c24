"""The state of a walk from a loss down its graph, and helpers that read the numbers saved in nodes."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, float32, float64

from lightning_memkit.micro_batching.graph.graph_nodes import (
    PASSED,
    is_number_viewed,
    is_packed,
    kind_of,
    numel_into,
    numel_out,
    of_parameters,
    of_weights,
    shape_into,
)
from lightning_memkit.micro_batching.graph.loss_terms import (
    Addend,
    Divisor,
    Edge,
    LossTerm,
    Number,
)

_FACTOR_NUMEL = 2**16


@dataclass(slots=True, eq=False)
class WalkPath:
    """A path from the loss to a term: the current node, and what was collected so far (see `LossTerm`)."""

    node: Any
    output: int
    last: Any  # the previous node, or the current one directly below a sum of several terms
    top: Addend
    summand: Addend
    entry: Any = None  # the first product with a parameter; that parameter's gradient has to be scaled, too
    is_entered: bool = False
    shared_factor: Any = None  # that entry, if the parameter scales other terms as well
    products: tuple[Edge, ...] = ()
    shared_products: tuple[Edge, ...] = ()  # those above the last sum of several terms
    is_offset: bool = False
    passed: tuple[Any, ...] = ()  # nodes below `entry`
    edge: Edge | None = None  # from the last sum of several terms to this one
    is_divided: bool = False  # below `edge`
    below: Edge | None = None  # from the last operation on the reduced rows to what other terms may share
    name: str = ""
    branch: str = ""
    divisor: Divisor = 1.0
    levels: tuple[tuple[str, Divisor], ...] = ()
    reduced: bool = False
    quotient: Divisor = 0.0
    is_multiplied: bool = False
    averaged: float = 1.0
    gain: Divisor = 1.0  # the product of all factors between this node's number and the loss
    sums: tuple[Addend, ...] = ()
    scaling: tuple[Tensor, ...] = ()  # tensors of several numbers that scale it since the last reduction
    factors: tuple[Tensor, ...] = ()
    element: int | None = None  # the index that is followed in a vector of losses
    place: Edge | None = None  # the edge along which that element's gradient can be scaled by itself
    by_column: bool = False  # read the quotients of a vector's columns as terms of their own

    @classmethod
    def of(cls, loss: Tensor, *, by_column: bool = False) -> "WalkPath":
        """A path that begins at a loss."""
        whole = Addend(Number(loss.grad_fn, loss.output_nr), 1.0)
        return cls(
            node=loss.grad_fn,
            output=loss.output_nr,
            last=loss.grad_fn,
            top=whole,
            summand=whole,
            by_column=by_column,
        )


def down(path: WalkPath, index: int) -> WalkPath:
    """Move the path to the node's `index`-th input."""
    if path.is_entered:
        path.passed = (*path.passed, path.node)
    if path.reduced and kind_of(path.node) not in PASSED:
        path.below = Edge(path.node, index)
    path.last = path.node
    path.node, path.output = path.node.next_functions[index]
    return path


def ended_term(path: WalkPath, *, curved: str = "", opaque: str = "") -> LossTerm:
    """The term at which a path ends; `curved` or `opaque` say why it can't be read further, if so."""
    bottom = path.last
    if not path.reduced:
        # Other terms may share nodes that are computed from parameters: scale on the edge to them. Otherwise
        # scale below the division, so that the nan of a division by zero is made before gradients are zeroed.
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
        averaged=path.averaged,
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
        end=path.node,
        below=None if path.is_entered or not path.reduced else path.below,
        curved=curved,
        opaque=opaque,
    )


def is_learned(path: WalkPath) -> bool:
    """Whether a learned factor scales the current node."""
    return bool(path.is_entered or path.shared_factor or path.products or path.shared_products)


def is_number(node: Any, index: int) -> bool:
    """Whether an input is a scalar or a 1-element view of one; any other 1-element vector is a row."""
    child = node.next_functions[index][0]
    return numel_into(node, index) == 1 and (not shape_into(node, index) or is_number_viewed(child))


def share(path: WalkPath) -> None:
    """Note that the learned factors on the path so far scale several terms."""
    path.shared_factor = path.shared_factor or (path.entry if path.is_entered else None)
    path.is_entered = False
    path.products, path.shared_products = (), (*path.shared_products, *path.products)


def addend(path: WalkPath) -> Addend:
    """What the number at the current node adds to the loss."""
    return Addend(Number(path.node, path.output, path.element), path.gain)


def sign_of(node: Any, index: int) -> float:
    """The factor (sign, `alpha`) by which an addition multiplies its `index`-th input."""
    alpha = float(getattr(node, "_saved_alpha", 1))
    signs = {"Add": (1.0, alpha), "Sub": (1.0, -alpha), "Rsub": (-alpha, 1.0)}.get(kind_of(node))
    return 1.0 if signs is None else signs[index]


def own_number(path: WalkPath, factor: Tensor) -> Tensor:
    """The element of a factor of a vector of losses that scales the loss that is followed."""
    return factor if factor.numel() == 1 or path.element is None else factor.reshape(-1)[path.element]


def leveled(path: WalkPath) -> WalkPath:
    """Note the divisor down to the current node in `levels`."""
    path.levels = (*path.levels, (path.name, path.divisor))
    return path


def divided(path: WalkPath, by: Divisor) -> WalkPath:
    """Multiply the path's divisor by another one."""
    path.divisor = path.divisor * in_double(by)
    return leveled(path)


def in_double(number: Divisor) -> Divisor:
    """A number in double precision; one on a device stays there, because fetching it would synchronize."""
    if not isinstance(number, Tensor):
        return number
    if number.device.type == "cpu":
        return float(number.item())
    return number.detach().to(float32 if number.device.type == "mps" else float64)


def inverse(factor: Divisor) -> Divisor:
    """One over a number, which may be on a device; infinity for zero."""
    factor = in_double(factor)
    if isinstance(factor, Tensor):
        return factor.reciprocal()
    return 1.0 / factor if factor else float("inf")


def scalar(path: WalkPath, name: str) -> "Divisor | None":
    """The number that a node has saved; None if it is a tensor of several, which scales elementwise."""
    raw = getattr(path.node, f"_raw{name}", None)
    is_large = numel_out(path.node, path.output) != 1 and path.element is None
    if raw is not None and is_packed(raw) and is_large:
        return None  # unpacking may copy a large tensor from the host, or recompute a forward
    value = getattr(path.node, name)
    if isinstance(value, Tensor):
        if path.element is not None:
            return value if value.numel() == 1 and value.ndim == 0 else None
        # In a micro-batch of one row a factor for each row is one number, too, but it has a dimension.
        by_row = path.reduced and value.ndim > 0 and numel_out(path.node, path.output) == 1
        return value if value.numel() == 1 and not by_row else None
    return None if value is None else float(value)


def note_scaling(path: WalkPath, name: str) -> None:
    """Keep a tensor of several numbers that scales a reduced value: another reduction may follow below."""
    if path.element is not None:
        value = getattr(path.node, name).detach()
        number = in_double(own_number(path, value))
        path.gain = path.gain * (inverse(number) if kind_of(path.node) == "Div" else number)
        path.factors = (*path.factors, value)
        return
    raw = getattr(path.node, f"_raw{name}", None)
    if not path.reduced or is_packed(raw):
        return
    value = getattr(path.node, name)
    if isinstance(value, Tensor) and value.numel() <= _FACTOR_NUMEL:
        path.scaling = (*path.scaling, value.detach())

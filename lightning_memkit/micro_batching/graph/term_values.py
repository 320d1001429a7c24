"""Note the values of a loss's terms while a step computes them; costs a microsecond a torch function."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_memkit.micro_batching.graph.graph_nodes import PARAMETER_NUMEL
from lightning_memkit.micro_batching.graph.loss_terms import Addend
from lightning_memkit.micro_batching.graph.term_rules import Reading, alike

_ROUNDINGS = 2.0  # by how many roundings of its summands' size a sum may be off

_DIFFERENTIATING = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


class TermValues(TorchFunctionMode):
    """While active, notes scalars and small vectors with a gradient, by the nodes that made them.

    Attributes:
        values: the noted values, by node and output (see `Number`).
        differentiates: whether a gradient was taken while it was active (by a gradient penalty, say).
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[tuple[Any, int], Tensor] = {}
        self.differentiates = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and note its results."""
        result = func(*args, **(kwargs or {}))
        self.differentiates = self.differentiates or func in _DIFFERENTIATING
        for one in result if isinstance(result, tuple) else (result,):
            if isinstance(one, Tensor) and one.grad_fn is not None and _is_noted(one):
                self.values[one.grad_fn, one.output_nr] = one.detach().clone()
        return result


def _is_noted(result: Tensor) -> bool:
    return result.numel() == 1 or (result.ndim == 1 and result.numel() <= PARAMETER_NUMEL)


def weighed_value(
    loss: Tensor, reading: Reading, shares: Sequence[float], values: Mapping[tuple[Any, int], Tensor]
) -> tuple[Tensor, list[Tensor] | None] | None:
    """What a micro-batch contributes to its batch's loss: the sum of its terms times their shares.

    If terms of equal shares lack values, the value of a sum of only these terms serves, or the loss minus all
    other terms.

    Args:
        loss: the micro-batch's loss.
        reading: the terms that were read from it.
        shares: the micro-batch's share of each term.
        values: the numbers that its step has computed (see `TermValues`).

    Returns:
        The contribution; and the parts of the loss without a gradient (see `Rest.pieces`), None if terms lack
        values. None instead of both if the contribution can't be computed.
    """
    total = loss.detach()
    known, weighed = torch.zeros_like(total), torch.zeros_like(total)
    pieces: list[Tensor] = []
    unknown: list[_Unknown] = []
    beside: set[Addend] = set()  # sums that hold a term with a value
    for tops, summands, sums, share in zip(reading.tops, reading.summands, reading.sums, shares, strict=True):
        added = torch.zeros_like(total)
        for top, summand, above_it in zip(tops, summands, sums, strict=True):
            own, above = top.value(values, total), summand.value(values, total)
            part = above if own is None else own
            if part is None:
                unknown.append(_Unknown(share, above_it))
                continue
            beside.update(above_it)
            known = known + (part if above is None else above)
            if own is not None and above is not None:
                added = added + (above - own)
            if share:  # a term of share 0 may be a mean over nothing, and 0 times nan is nan
                weighed = weighed + part * share
        pieces.append(added)
    if not unknown:
        return weighed, [*pieces, total - known]
    for addend, share in _sums_of_unknown(unknown, beside, values):
        part = addend.value(values, total)
        assert part is not None
        known = known + part
        weighed = weighed + part * share if share else weighed
    rest = [one.share for one in unknown if not one.is_told]
    if not rest:
        return weighed, [*pieces, total - known]
    if not alike(rest) or not bool(known.isfinite()):
        return None
    return weighed + (total - known) * rest[0] if rest[0] else weighed, None


@dataclass
class _Unknown:
    """A term without a known value: its share, and the sums in which it is contained."""

    share: float
    sums: tuple[Addend, ...]
    is_told: bool = False


def _sums_of_unknown(
    unknown: list[_Unknown], beside: set[Addend], values: Mapping[tuple[Any, int], Tensor]
) -> Iterator[tuple[Addend, float]]:
    """Sums of known value that consist of unknown terms of one share only; the outermost first."""
    for one in unknown:
        for addend in one.sums:
            if one.is_told or addend in beside or addend.number.value(values) is None:
                continue
            below = [other for other in unknown if addend in other.sums]
            if alike([other.share for other in below]) and not any(other.is_told for other in below):
                for other in below:
                    other.is_told = True
                yield addend, one.share


def rounding_of_terms(reading: Reading, values: Mapping[tuple[Any, int], Tensor], loss: Tensor) -> float:
    """The rounding error of adding up the terms of a loss, which may exceed the loss; 0 if a term is nan."""
    numbers = [
        addend.number.value(values)
        for own in (reading.tops, reading.summands)
        for addends in own
        for addend in addends
    ]
    kinds = {loss.dtype, *(number.dtype for number in numbers if number is not None)}
    parts = [top.value(values, loss.detach()) for tops in reading.tops for top in tops]
    size = abs(float(loss)) + sum(abs(float(part)) for part in parts if part is not None)
    return _ROUNDINGS * max(torch.finfo(kind).eps for kind in kinds) * size if size < float("inf") else 0.0

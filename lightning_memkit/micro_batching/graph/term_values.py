"""The numbers that a loss is added up from, noted while a step computes them; costs a microsecond a function."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_memkit.micro_batching.graph.graph_nodes import PARAMETER_NUMEL
from lightning_memkit.micro_batching.graph.loss_terms import Addend
from lightning_memkit.micro_batching.graph.term_rules import Reading, alike

_ROUNDINGS = 2.0  # of the largest of some numbers: what their sum may be off by

_DIFFERENTIATING = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


class TermValues(TorchFunctionMode):
    """While it is active, numbers and small vectors with a gradient are noted by what made them (see `Number`).

    Attributes:
        values: these, by node and output.
        differentiates: whether a gradient was taken (by a gradient penalty, say).
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[tuple[Any, int], Tensor] = {}
        self.differentiates = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and note its result, or results."""
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
    """What a micro-batch adds to its batch's loss, each term by its own share; None where this can't be told.

    Terms of one share that lack values are known by the sum that they alone are added up to, or are what all others
    leave of the loss.

    Args:
        loss: its loss.
        reading: what that shows.
        shares: of each term.
        values: the numbers that its step has computed.

    Returns:
        The weighed terms; and what has no gradient (see `Rest.pieces`), None where terms lack values.
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
            if share:  # what counts nothing may be a mean over nothing: nan
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
    """A term that lacks a value: its share, and the sums that it is added up to."""

    share: float
    sums: tuple[Addend, ...]
    is_told: bool = False


def _sums_of_unknown(
    unknown: list[_Unknown], beside: set[Addend], values: Mapping[tuple[Any, int], Tensor]
) -> Iterator[tuple[Addend, float]]:
    """The known sums of nothing but terms that lack values and have one share, the outermost first."""
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
    """What adding up the terms of a loss rounds, which may be larger than the loss; 0 where one is nan."""
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

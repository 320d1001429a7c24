"""The numbers that a loss is added up from, noted while a step computes them; costs a microsecond a function."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_memkit.micro_batching.loss_rules import Reading
from lightning_memkit.micro_batching.loss_terms import Divisor


class TermValues(TorchFunctionMode):
    """While it is active, every single number with a gradient is noted by the node that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[Any, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and note its result where it is one number."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.grad_fn is not None and result.numel() == 1:
            self.values[result.grad_fn] = result.detach().clone()
        return result


def weighed_value(
    loss: Tensor, reading: Reading, shares: Sequence[float], values: Mapping[Any, Tensor]
) -> tuple[Tensor, list[Tensor] | None] | None:
    """What a micro-batch adds to its batch's loss, each term by its own share; None where this can't be told.

    The terms of one share may lack values: they are what the others leave of the loss.

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
    unknown: set[float] = set()
    for tops, summands, share in zip(reading.tops, reading.summands, shares, strict=True):
        added = torch.zeros_like(total)
        for top, summand in zip(tops, summands, strict=True):
            own, above = _part(top, values, total), _part(summand, values, total)
            part = above if own is None else own
            if part is None:
                unknown.add(share)
                continue
            known = known + (part if above is None else above)
            if own is not None and above is not None:
                added = added + (above - own)
            if share:  # what counts nothing may be a mean over nothing: nan
                weighed = weighed + part * share
        pieces.append(added)
    left = total - known
    if not unknown:
        return weighed, [*pieces, left]
    if len(unknown) > 1 or not bool(known.isfinite()):
        return None
    (share,) = unknown
    return weighed + left * share if share else weighed, None


def size_of_terms(reading: Reading, values: Mapping[Any, Tensor], loss: Tensor) -> float:
    """The sum of the terms' amounts, which may be larger than the loss and round more."""
    parts = [_part(top, values, loss.detach()) for tops in reading.tops for top in tops]
    return sum(abs(float(part)) for part in parts if part is not None)


def _part(place: tuple[Any, Divisor], values: Mapping[Any, Tensor], total: Tensor) -> Tensor | None:
    """What a node's number adds to the loss."""
    node = place[0]
    value = values.get(node)
    if value is None and hasattr(node, "variable"):  # a parameter by itself, which no function has made
        value = node.variable.detach() if node.variable.numel() == 1 else None
    return None if value is None else value.reshape(()).to(total) * place[1]

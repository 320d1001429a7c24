"""The numbers that a loss is added up from, noted while a step computes them; costs a microsecond a function."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_memkit.micro_batching.loss_rules import Reading


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
) -> Tensor | None:
    """What a micro-batch adds to its batch's loss, each term by its own share; None where this can't be told.

    The terms of one share may lack values: they are what the others leave of the loss.
    """
    total = loss.detach()
    known, weighed = torch.zeros_like(total), torch.zeros_like(total)
    unknown: set[float] = set()
    for tops, share in zip(reading.tops, shares, strict=True):
        for node, gain in tops:
            value = values.get(node)
            if value is None:
                unknown.add(share)
                continue
            part = value.reshape(()).to(total) * gain
            known = known + part
            if share:  # what counts nothing may be a mean over nothing: nan
                weighed = weighed + part * share
    if len(unknown) > 1 or (unknown and not bool(known.isfinite())):
        return None
    left = unknown.pop() if unknown else 0.0
    return weighed + (total - known) * left if left else weighed

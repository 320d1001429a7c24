"""Compare what a batch in micro-batches returns and leaves in its module with what the whole batch does.

`scores[:16]` are all rows of the few that trials compare.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

_CHUNK = 2**22  # elements that are compared at once


@dataclass(frozen=True, kw_only=True)
class OfWhole:
    """What a whole batch has returned, to be compared with what its micro-batches are joined to.

    Attributes:
        returned: besides the loss.
        allowed: the error of a tensor, relative by norm, that counts as rounding; infinite to compare shapes only.
    """

    returned: Mapping[str, Any]
    allowed: float

    def unlike(self, joined: Mapping[str, Any]) -> list[str]:
        """The names of values of other shapes or entries, or of other numbers in their rows."""
        return unlike(joined, self.returned, self.allowed)


def unlike(ours: Mapping[str, Any], theirs: Mapping[str, Any], allowed: float) -> list[str]:
    """The names of values that differ; numbers by themselves are not compared."""
    return [name for name in ours if name in theirs and _differ(ours[name], theirs[name], allowed)]


def _differ(ours: Any, theirs: Any, allowed: float) -> bool:
    if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        return ours.shape != theirs.shape
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return ours.shape != theirs.shape or _is_apart(ours, theirs, allowed)
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return ours.keys() != theirs.keys() or bool(unlike(ours, theirs, allowed))
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            return True
        return any(_differ(one, other, allowed) for one, other in zip(ours, theirs, strict=True))
    return False


def _is_apart(ours: Tensor, theirs: Tensor, allowed: float) -> bool:
    """Whether two tensors of one shape differ by more than rounding; a choice of integers may turn on a last bit."""
    plain = ours.layout is torch.strided and theirs.layout is torch.strided and ours.device == theirs.device
    if not (isfinite(allowed) and plain and ours.is_floating_point() and theirs.numel() > 1):
        return False
    distance = size = torch.zeros((), device=ours.device)
    wide = torch.promote_types(ours.dtype, torch.float32)
    for one, other in zip(_chunks(ours.detach()), _chunks(theirs.detach()), strict=True):
        one, other = one.to(wide).nan_to_num(), other.to(wide).nan_to_num()
        distance = distance + (one - other).square().sum()
        size = size + torch.maximum(one.square().sum(), other.square().sum())
    return bool(distance.sqrt() > allowed * size.sqrt())


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    if not tensor.ndim or not tensor.numel():
        return (tensor,)
    return tensor.split(max(1, _CHUNK * len(tensor) // tensor.numel()))

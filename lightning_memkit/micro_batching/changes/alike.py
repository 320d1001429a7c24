"""Compare two values of any type by content."""

from collections import deque
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lightning_memkit.micro_batching.changes.own_objects import DEEPEST, is_own, state_of
from lightning_memkit.utilities.tensors import is_wrapper

_PLAIN = frozenset({int, str, bytes, bool, type(None)})
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def alike(a: Any, b: Any, depth: int = 0) -> bool:
    """Whether two values are equal; identical objects are, without a look at their content."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _same_tensor(a, b)
    if type(a) is not type(b) or depth > DEEPEST:
        return False
    if isinstance(a, np.ndarray):
        same = a.shape == b.shape and a.dtype == b.dtype
        return same and (
            a.tobytes() == b.tobytes() if a.dtype != object else alike(list(a.flat), list(b.flat))
        )
    if isinstance(a, Mapping):
        return len(a) == len(b) and all(
            (k is j or _equal(k, j)) and alike(v, w, depth + 1)
            for (k, v), (j, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (list, tuple, deque)):
        types = list(map(type, a))
        if _PLAIN.issuperset(types):  # a generator's state has 625 numbers: not one by one
            return types == list(map(type, b)) and a == b
        return len(a) == len(b) and all(alike(v, w, depth + 1) for v, w in zip(a, b, strict=True))
    if isinstance(a, Set) or not hasattr(a, "__dict__"):
        return _equal(a, b)
    if isinstance(a, nn.Module) or not is_own(a, frozenset()):
        return _equal(a, b)
    return alike(state_of(a), state_of(b), depth + 1)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are known to be equal bit for bit; allocates nothing, as it runs after an OOM."""
    bits = BITS.get(a.element_size())
    if a.device != b.device or a.layout is not torch.strided or a.is_meta or bits is None or a.is_quantized:
        return False
    if is_wrapper(a) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point() or a.is_complex():
        a, b = a.view(bits), b.view(bits)
    return torch.equal(a, b)


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    if (
        isinstance(b, (UninitializedBuffer, UninitializedParameter))
        or a.shape != b.shape
        or a.dtype != b.dtype
    ):
        return False
    a, b = a.detach(), b.detach()
    a, b = getattr(a, "_local_tensor", a), getattr(b, "_local_tensor", b)
    if (
        a.layout is not torch.strided
        or b.layout is not torch.strided
        or a.is_meta
        or b.is_meta
        or a.is_quantized
    ):
        return False
    with torch.no_grad():
        b = b.to(a.device)
        if torch.equal(a, b):
            return True
        # A number is nan where one in the tensor is; else nothing of the tensor's size is allocated.
        if not (a.is_floating_point() or a.is_complex()) or not a.sum().isnan():
            return False
        return (
            same_bits(a, b)
            or torch.equal(a.nan_to_num(), b.nan_to_num())
            and torch.equal(a.isnan(), b.isnan())
        )


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or (isinstance(a, float) and a != a and b != b)
    except (TypeError, ValueError, RuntimeError):
        return False

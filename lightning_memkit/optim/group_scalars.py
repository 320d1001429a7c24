"""Copies and restores an optimizer's group entries beside the parameters: learning rates, some counters."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

_IMMUTABLE = (int, float, str, type(None))


def group_scalars(optimizer: Optimizer) -> list[dict[str, Any]]:
    """A copy of each group's entries, without its parameters."""
    stay = cache(partial(_parameters, optimizer))
    return [
        {key: copied(value, stay) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def restore_group_scalars(optimizer: Optimizer, scalars: list[dict[str, Any]]) -> None:
    """Restore `group_scalars` into the same dicts, and tensors (a capturable learning rate) into the same memory."""
    stay = cache(partial(_parameters, optimizer))
    for group, kept in zip(optimizer.param_groups, scalars, strict=True):
        for key in group.keys() - kept.keys() - {"params"}:
            del group[key]
        for key, value in kept.items():
            now = group.get(key)
            if isinstance(now, Tensor) and isinstance(value, Tensor) and _fits(now, value):
                now.detach().copy_(value)
            else:
                group[key] = copied(value, stay)


def copied(value: Any, stay: Callable[[], dict[int, Any]] = dict) -> Any:
    """A deep copy that is cheap for immutable values; called once per bucket.

    Args:
        value: anything.
        stay: gives the objects within it that are not copied, by id, such as parameters that key a dict.
    """
    if isinstance(value, _IMMUTABLE):
        return value
    if type(value) is tuple and all(isinstance(item, _IMMUTABLE) for item in value):  # betas
        return value
    return value.detach().clone() if isinstance(value, Tensor) else deepcopy(value, dict(stay()))


def _parameters(optimizer: Optimizer) -> dict[int, Any]:
    """By id; entries may have them as keys or values."""
    return {id(p): p for group in optimizer.param_groups for p in group["params"]}


def _fits(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)

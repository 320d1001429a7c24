"""Refuses what released gradients do not support, before it goes wrong."""

from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.optim.methods import (
    refuse_closures,
    refuse_sums_over_the_model,
    refuse_zero_redundancy,
)


def refuse_unreleasable(optimizer: Optimizer) -> None:
    """Refuse optimizers whose step needs all gradients at once.

    Raises:
        TypeError: the step demands a closure, or is ZeRO-1's.
        ValueError: the step combines gradients over the model, or a group asks for a differentiable step.
    """
    refuse_zero_redundancy(optimizer, "a step within backward")
    refuse_closures(optimizer, "a step within backward")
    refuse_sums_over_the_model(optimizer, "a step within backward")


def refuse_gradient(parameter: Parameter, gradient: Tensor) -> None:
    """Refuse a gradient that can't be used once and freed.

    Raises:
        RuntimeError: it is sparse, or is to be differentiated itself.
    """
    if gradient.is_sparse:
        raise RuntimeError(
            f"The gradient of a parameter of shape {tuple(parameter.shape)} is sparse, which can't be released: "
            "build the module with sparse=False."
        )
    if gradient.requires_grad:
        raise RuntimeError(
            f"The gradient of a parameter of shape {tuple(parameter.shape)} is to be differentiated "
            "(create_graph=True), but it is used and dropped at once: take second derivatives with "
            "torch.autograd.grad, or don't release gradients."
        )


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Each group as it is now, for `refuse_changed_options`; made for each bucket, so nothing is selected yet."""
    return [group.copy() for group in optimizer.param_groups]


def refuse_changed_options(optimizer: Optimizer, before: list[dict[str, Any]]) -> None:
    """Refuse options that changed after parameters were stepped with the old ones.

    Raises:
        RuntimeError: naming the first option that differs.
    """
    old, now = _options_of(before), _options_of(optimizer.param_groups)
    if now != old:
        raise RuntimeError(
            f"Options of {type(optimizer).__name__} changed between backward and step(), after parameters were "
            f"stepped with the old ones ({_change(old, now)}); change them before backward, or after step()."
        )


def _options_of(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The plain values (numbers, flags, strings) of each group."""
    plain = (int, float, str, tuple, type(None))
    return [{key: value for key, value in group.items() if isinstance(value, plain)} for group in groups]


def _change(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """Name the first option that differs."""
    for old, new in zip(before, after, strict=False):
        for key in old:
            if new.get(key) != old[key]:
                return f"{key}: {old[key]} became {new.get(key)}"
    return "groups were added"

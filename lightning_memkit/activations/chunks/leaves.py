"""Finds the tensors at the end of an autograd graph."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def leaves_behind(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The leaf tensors to which gradients of these outputs flow."""
    waiting: list[Any] = [one.grad_fn for one in outputs if one.grad_fn is not None]
    found = {id(one): one for one in outputs if one.is_leaf and one.requires_grad}
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return list(found.values())


def oldest_behind(outputs: Sequence[Tensor]) -> int:
    """The number of the first node of a graph, by the order in which autograd made them in this thread."""
    waiting: list[Any] = [one.grad_fn for one in outputs if one.grad_fn is not None]
    seen, oldest = set(waiting), next_number()
    while waiting:
        node = waiting.pop()
        oldest = min(oldest, node._sequence_nr())
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return oldest


def next_number() -> int:
    """The number that autograd gives its next node in this thread, about."""
    with torch.enable_grad():
        made: Any = torch.zeros((), requires_grad=True).view(()).grad_fn
    return made._sequence_nr()

"""Finds the tensors at the end of an autograd graph."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def leaves_behind(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The leaf tensors to which gradients of these outputs flow."""
    found = {id(one): one for one in outputs if one.is_leaf and one.requires_grad}
    for node in _nodes_behind(outputs):
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
    return list(found.values())


def oldest_behind(outputs: Sequence[Tensor]) -> int:
    """The number of the first node of a graph, by the order in which autograd made them in this thread."""
    return min((node._sequence_nr() for node in _nodes_behind(outputs)), default=next_number())


def next_number() -> int:
    """A number that no node of this thread's graphs has so far; those of later nodes are larger."""
    with torch.enable_grad():
        made: Any = torch.zeros((), requires_grad=True).view(()).grad_fn
    return made._sequence_nr()


def _nodes_behind(outputs: Sequence[Tensor]) -> Iterator[Any]:
    waiting: list[Any] = [one.grad_fn for one in outputs if one.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)

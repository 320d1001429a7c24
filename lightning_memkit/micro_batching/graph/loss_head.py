"""Notice that a loss is computed by other functions than before, from the nodes next to it; 0.1 ms a batch.

A step may change in the middle of a run: hard examples are mined from some step on, features are centered over
the batch. Its terms can look the same. The functions that computed it, and which follows which, do not.
"""

from typing import Any

from torch import Tensor

from lightning_memkit.micro_batching.graph.graph_nodes import kind_of

Edges = frozenset[tuple[str, str]]

_NODES = 96  # next to the loss


def head_of(loss: Tensor) -> Edges:
    """The pairs of functions, one applied to the result of the other, among the nodes next to a loss.

    A set: a loss that loops over rows has the same for any number of rows.
    """
    if loss.grad_fn is None:
        return frozenset()
    found: set[tuple[str, str]] = set()
    level: list[Any] = [loss.grad_fn]
    kinds = {loss.grad_fn: kind_of(loss.grad_fn)}
    while level and len(kinds) <= _NODES:
        below: list[Any] = []
        for node in level:
            kind = kinds[node]
            for child, _ in node.next_functions:
                if child is None:
                    continue
                its_kind = kinds.get(child)
                if its_kind is None:
                    its_kind = kinds[child] = kind_of(child)
                    below.append(child)
                found.add((kind, its_kind))
        level = below
    return frozenset(found)

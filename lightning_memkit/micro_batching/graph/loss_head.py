"""Notice that a loss is computed by other functions than before, from the nodes next to it; 0.1 ms a batch.

A step may change in the middle of a run: hard examples are mined from some step on, features are centered over
the batch. Its terms can look the same. The functions that computed it, and which follows which, do not; nor does
whether they take all that they choose from: the three hardest negatives for each positive are all of the negatives in
one batch, and some in the next.
"""

from functools import lru_cache
from typing import Any

from torch import Tensor

from lightning_memkit.micro_batching.graph.graph_nodes import kind_of, numel_into, numel_out

Edges = frozenset[tuple[str, str]]

_NODES = 96  # next to the loss
# Functions that may take all elements or some, by a number or by indices that a step computes from the rows.
_CHOOSING = frozenset("Gather Index IndexSelect MaskedSelect Slice Topk".split())
_OF_SOME = " of some"


def head_of(loss: Tensor) -> Edges:
    """The pairs of functions, one applied to the result of the other, among the nodes next to a loss.

    A set: a loss that loops over rows has the same for any number of rows.
    """
    if loss.grad_fn is None:
        return frozenset()
    found: set[tuple[str, str]] = set()
    level: list[Any] = [loss.grad_fn]
    kinds = {loss.grad_fn: _name_of(loss.grad_fn)}
    while level and len(kinds) <= _NODES:
        below: list[Any] = []
        for node in level:
            kind = kinds[node]
            for child, _ in node.next_functions:
                if child is None:
                    continue
                its_kind = kinds.get(child)
                if its_kind is None:
                    its_kind = kinds[child] = _name_of(child)
                    below.append(child)
                found.add((kind, its_kind))
        level = below
    return frozenset(found)


@lru_cache(maxsize=64)
def chooses(head: Edges) -> bool:
    """Whether a loss chooses among elements: some micro-batches may take all, so each loss has to be looked at.

    For others the first loss of a batch tells.
    """
    return any(kind in _CHOOSING or kind.endswith(_OF_SOME) for kind, _ in head)


def _name_of(node: Any) -> str:
    """A node's kind, and whether it takes only some of the elements of its input."""
    kind = kind_of(node)
    if (
        kind in _CHOOSING
        and node.next_functions[0][0] is not None
        and numel_out(node, 0) < numel_into(node, 0)
    ):
        return kind + _OF_SOME
    return kind

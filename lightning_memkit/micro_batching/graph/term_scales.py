"""Scale the gradient of each term of a loss by its own share, by hooks that the next backward runs.

Source: torch's `Node.register_hook` and `Node.register_prehook`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.micro_batching.graph.graph_nodes import numel_into
from lightning_memkit.micro_batching.graph.loss_terms import Edge
from lightning_memkit.micro_batching.graph.term_rules import Reading


def scale_terms(reading: Reading, shares: Sequence[float]) -> None:
    """Let the next backward scale each term's gradient by its share; a term of share 0 passes zeros on.

    The gradient is scaled below the term's division, so that the nan of a division by zero is replaced. Terms
    below one learned factor are scaled together at that factor; those of share 0 also at their own nodes.
    """
    of_factors: dict[Any, float] = {}
    for nodes, share, factors in zip(reading.nodes, shares, reading.shared_factors, strict=True):
        for factor in factors:
            of_factors[factor] = of_factors.get(factor) or share
        if not factors or not share:
            for node in nodes:
                _scale(node, share)
    for factor, share in of_factors.items():
        _scale(factor, share)
    of_some = [reading.bottoms, reading.products, reading.shared_products]
    kept = {
        place
        for places in of_some
        for own, share in zip(places, shares, strict=True)
        if share
        for place in own
    }
    for nodes, share, *places in zip(reading.nodes, shares, *of_some, strict=True):
        if not share:
            for place in dict.fromkeys(place for own in places for place in own):
                if place not in kept and place not in nodes:
                    _scale(place, 0.0)


def _scale(place: Any, share: float) -> None:
    """Register a hook that scales the gradient that passes a node or an edge."""
    if isinstance(place, Edge):
        place.node.register_hook(_scaled_edge(place, share))
    else:
        place.register_prehook(_scaled_by(share))


def _scaled_by(share: float) -> Any:
    def scale(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else _times(g, share, None) for g in gradients)

    return scale


def _scaled_edge(edge: Edge, share: float) -> Any:
    # A vector may be multiplied by a scalar, whose gradient has no element to scale: match inputs by size.
    numel = None if edge.index is not None or edge.element is None else _vector_numel(edge.node)

    def scale(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        return tuple(
            g
            if g is None or edge.index not in (None, index) or numel not in (None, g.numel())
            else _times(g, share, edge.element)
            for index, g in enumerate(gradients)
        )

    return scale


def _vector_numel(node: Any) -> int:
    return max(numel_into(node, i) for i, (child, _) in enumerate(node.next_functions) if child is not None)


def _times(gradient: Tensor, share: float, element: int | None) -> Tensor:
    """A gradient, or one element of it, times a share; a share of 0 gives 0 even for nan."""
    if element is None:
        return gradient * share if share else torch.zeros_like(gradient)
    scaled = gradient.clone(memory_format=torch.contiguous_format)
    scaled[element] = scaled[element] * share if share else 0.0
    return scaled

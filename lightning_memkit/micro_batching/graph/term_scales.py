"""Scale the gradient of each term of a loss by its own share, in the backward that comes; nothing is computed here.

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
    """Let the coming backward scale each term's gradient by its share; one that weighs nothing sends none on.

    The scale is set where the gradient enters the term, behind its division: what a division by zero made of it is
    dropped. Terms below one learned factor are scaled above it, and those of them that weigh nothing by themselves.
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
    """Scale the gradient that passes a node or an edge."""
    if isinstance(place, Edge):
        place.node.register_hook(_scaled_edge(place, share))
    else:
        place.register_prehook(_scaled_by(share))


def _scaled_by(share: float) -> Any:
    def scale(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else _times(g, share, None) for g in gradients)

    return scale


def _scaled_edge(edge: Edge, share: float) -> Any:
    # What a vector is multiplied with may be a number, of which no element is one term's.
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
    """A gradient times a share, of which 0 makes 0 of anything; or one number of it."""
    if element is None:
        return gradient * share if share else torch.zeros_like(gradient)
    scaled = gradient.clone(memory_format=torch.contiguous_format)
    scaled[element] = scaled[element] * share if share else 0.0
    return scaled

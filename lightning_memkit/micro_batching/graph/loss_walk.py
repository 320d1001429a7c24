"""Read from the autograd graph which sums a loss consists of, and their divisors; costs microseconds.

Below a loss are a few nodes that add, scale and divide, then the reductions over the batch:
`NllLossBackward0` with the weight of its labels, `DivBackward0` over a `SumBackward0` with its divisor,
`MeanBackward0` with its count. `terms_of` walks from the loss to these reductions and returns each with its
divisor and factors. No mode is active, no operator is patched, and nothing is computed. Interaction of rows
below a reduction is not detected here.

Source: torch's "Autograd mechanics" (`grad_fn`, `next_functions`, saved tensors).
"""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from math import isinf
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memkit.micro_batching.graph.graph_nodes import (
    ADDED,
    CURVED,
    MOST_NODES,
    PASSED,
    factors_below,
    is_number_viewed,
    kind_of,
    numel_out,
    of_parameters,
    of_weights,
    signed,
)
from lightning_memkit.micro_batching.graph.loss_terms import (
    LossTerm,
    LossTerms,
)
from lightning_memkit.micro_batching.graph.walk_path import WalkPath, divided, down, ended_term, inverse
from lightning_memkit.micro_batching.graph.walk_rules import RULES, branched, branched_vector, elements


def terms_of(loss: Tensor, *, by_column: bool = False) -> LossTerms:
    """Read the terms of a loss from its graph; nothing is computed, and the loss is kept, with its nodes.

    Args:
        loss: a scalar with a graph.
        by_column: whether each column is a term, where the loss adds up the columns of a vector of quotients.

    Returns:
        The terms. One is `curved` if a nonlinear function follows a reduction, and `opaque` if a custom
        function or a compiled graph hides its divisor. A `torch.autograd.Function` can reveal its divisor by
        setting the attribute `loss_divisor` (a number or a 0-dim tensor) on its context, which is the graph's
        node.
    """
    if loss.grad_fn is None:
        return LossTerms(opaque="a loss without a graph")
    # Under a dispatch mode, operators refuse the scalars that nodes have saved: they come as Python numbers.
    with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
        return _walked(loss, by_column)


def _walked(loss: Tensor, by_column: bool) -> LossTerms:
    terms: dict[Any, LossTerm] = {}
    paths = [WalkPath.of(loss, by_column=by_column)]
    visited = 0
    while paths:
        visited += 1
        if visited > MOST_NODES:
            return LossTerms(opaque=f"a loss of more than {MOST_NODES} terms")
        step = _step(paths.pop())
        if isinstance(step, LossTerm):
            _add(terms, step)
        else:
            paths.extend(reversed(step))
    found = tuple(terms.values())
    named = Counter(term.name for term in found)
    lone = [term for term in found if named[term.name] == 1]
    passed = {node for term in found for node in term.passed if node is not term.nodes[0]}
    return LossTerms(
        terms=found,
        curved=next((term.curved for term in lone if term.curved), ""),
        opaque=next((term.opaque for term in lone if term.opaque), ""),
        is_crossed=any(node in passed for term in found for node in term.nodes),
        loss=loss,
    )


def _step(path: WalkPath) -> Any:
    """Go one node further: the paths from it, or the term that ends here."""
    node, kind = path.node, kind_of(path.node)
    present = [index for index, (child, _) in enumerate(node.next_functions) if child is not None]
    if kind in ADDED:
        return branched(path, present)
    if path.element is not None and is_number_viewed(node):
        return branched_vector(path, present, path.element)
    shown = getattr(node, "loss_divisor", None)
    rule = RULES.get(kind)
    if rule is not None and present and shown is None:
        if kind not in PASSED:
            path.name = f"{path.name}/{kind}"
        return rule(path, present)
    path.name = f"{path.name}/{kind}"
    if shown is not None:
        return ended_term(divided(path, shown))
    if kind in ("_DDPSinkBackward", "torch::autograd::CppFunction") and path.output < len(
        node.next_functions
    ):
        return [down(path, path.output)]
    if kind in ("Select", "Unbind") and present and not factors_below(node.next_functions[0][0]):
        number = path.output if kind == "Unbind" else signed(node._saved_index)
        ways = elements(path, present[0], number)
        if ways is not None:
            return ways
    if path.reduced or of_parameters(node):
        return ended_term(path)
    if numel_out(node, path.output) == 1:
        if of_weights(node):
            return ended_term(path)  # a norm of weights, which depends on no row
        if kind in CURVED:
            return ended_term(path, curved=kind.lower())
    return ended_term(path, opaque=node.name())


def _add(terms: dict[Any, LossTerm], term: LossTerm) -> None:
    """Add a term, unless it is multiplied by zero; occurrences of one term are merged.

    Terms that only share their rows (a mean over tokens, and one over rows of such means) are scaled above these.
    """
    if isinstance(term.divisor, float) and isinf(term.divisor):
        return
    if term.below is not None:
        term = replace(term, nodes=(term.below,), bottom=term.below)
    node = term.nodes[0]
    if node in terms:
        term = replace(term, divisor=inverse(inverse(terms[node].divisor) + inverse(term.divisor)))
    terms[node] = term

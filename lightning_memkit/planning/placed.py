"""A calculation by hand for runs that spread memory over ranks, host, chunks or released gradients."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lightning_memkit.activations.blocks import find_blocks
from lightning_memkit.distributed.sharding import Sharding
from lightning_memkit.planning.choices import ACTIVATIONS, GIVEN, STATES, STATES_AND_ACTIVATIONS, listed
from lightning_memkit.planning.problem import Row
from lightning_memkit.prediction.by_hand import Term

_SHARED = ("weights", "gradients", "optimizer_states", "compensation")
_STATES = ("optimizer_states", "compensation")
_SHARDED = "arXiv:2304.11277"
_BLOCKS_HERE = 2  # with offloaded activations: one in use, one being copied


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a configuration keeps its memory.

    Attributes:
        policy: of activation checkpointing; empty without.
        is_chunked: whether the loss never has all logits of the micro-batch.
        is_released: whether gradients are released within the backward.
        states_on_host: whether states are on the host between steps.
        activations_on_host: whether activations are on the host between forward and backward.
        shares: over how many ranks each weight is sharded.
        stage: the stage of FSDP2; 0 without.
    """

    policy: str
    is_chunked: bool
    is_released: bool
    states_on_host: bool
    activations_on_host: bool
    shares: int
    stage: int

    @staticmethod
    def of(row: Row, given: Mapping[str, Any]) -> "Placement":
        """The placement that follows from a row's choices and from the given arguments."""
        named = {type(one).__name__: one for one in listed(given.get("callbacks"))}
        family, ranks = row.family, row.prediction.ranks if row.prediction is not None else 1
        policy, offload = family["checkpointing"].name, family["offload"].name
        if policy == GIVEN:
            policy = getattr(named.get("ActivationCheckpointing"), "policy", "")
        strategy = family["ranks"].arguments.get("strategy")
        return Placement(
            policy="" if policy == "none" else policy,
            is_chunked=family["loss"].name == "chunked" or "ChunkedLoss" in named,
            is_released=family.is_released,
            states_on_host=offload in (STATES, STATES_AND_ACTIVATIONS) or "OptimizerOffload" in named,
            activations_on_host=offload in (ACTIVATIONS, STATES_AND_ACTIVATIONS)
            or "ActivationOffload" in named,
            shares=ranks if isinstance(strategy, Sharding) else 1,
            stage=strategy.stage if isinstance(strategy, Sharding) else 0,
        )

    def of_terms(self, terms: tuple[Term, ...], module: nn.Module, layers: int) -> Iterator[Term]:
        """The terms changed according to this placement.

        Args:
            terms: of a single device that holds everything.
            module: gives the shapes of the parameters.
            layers: the number of blocks; 0 if unknown.
        """
        trained = [one.numel() for one in module.parameters() if one.requires_grad]
        for term in terms:
            if self.is_released and term.category == "gradients":
                yield _of_largest(term, "the largest gradient", trained)
            elif self.states_on_host and term.category in _STATES:
                yield _of_largest(term, f"{term.name} of the largest parameter", trained)
            elif self.shares > 1 and term.category in _SHARED:
                size = round(term.size_bytes / self.shares)
                yield replace(term, formula=f"{term.formula} / {self.shares}", size_bytes=size)
            elif self.activations_on_host and layers and term.name in ("blocks", "inputs of the blocks"):
                size = round(term.size_bytes * _BLOCKS_HERE / layers)
                yield replace(term, formula=f"{_BLOCKS_HERE} of {term.formula}", size_bytes=size)
            else:
                yield term


def gathered(module: nn.Module, stage: int, value_bytes: int) -> Iterator[Term]:
    """FSDP2's gathered weights (a block and the next, or all at stage 2), and a block's gradients."""
    counts = [sum(one.numel() for one in block.parameters()) for _, block in find_blocks(module)]
    if not counts:
        return
    rest, largest = sum(one.numel() for one in module.parameters()) - sum(counts), max(counts)
    kept = ("a block and the next gathered", (2, largest))
    if stage == 2:
        kept = (f"{len(counts)} blocks gathered", (sum(counts),))
    yield Term.of("communication", *kept, value_bytes, _SHARDED)
    yield Term.of("communication", "the rest gathered", (rest,), value_bytes, _SHARDED)
    yield Term.of("gradients", "a block's gradients, whole", (largest,), value_bytes, _SHARDED)
    yield Term.of("communication", "the same on their way", (largest,), value_bytes, _SHARDED)


def chunked_head(tokens: int, hidden: int, vocabulary: int, value_bytes: int) -> Iterator[Term]:
    """A loss without logits: the gradients that its forward computes, and one chunk of logits."""
    yield Term.of("saved_activations", "gradient of the head", (vocabulary, hidden), value_bytes)
    yield Term.of("saved_activations", "gradient of its input", (tokens, hidden), value_bytes)
    yield Term(
        category="temporaries",
        name="a chunk of logits",
        formula=f"{vocabulary:,}·{hidden:,} × 4 / 3",
        size_bytes=max(round(vocabulary * hidden * 4 / 3), 1 << 25),
    )


def _of_largest(term: Term, name: str, trained: Sequence[int]) -> Term:
    """What is there of a term while parameters are taken one by one: the part of the largest of them."""
    each = term.size_bytes / max(1, sum(trained))
    return Term.of("temporaries", name, (max(trained, default=0),), each, term.source)

"""Where a loss's terms come from: the nearest parameter, and what is chosen of each row's values on the way to it."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from lightning_memkit.distributed.fsdp2 import gathered_parameters
from lightning_memkit.micro_batching.graph.graph_nodes import LEAF, chosen_by, kind_of
from lightning_memkit.micro_batching.graph.loss_terms import Edge, LossTerm

_NEAR, _FURTHER = 32, 8  # levels of nodes down to the nearest parameter, and below it
Key = int | str  # a parameter: its `id`, or its name


class Origin(NamedTuple):
    """Where a term comes from, to tell the terms of several tasks apart.

    Args:
        nearest: the nearest parameter, as of the head that the term judges; 0 or empty if none is near.
        chosen: what is chosen of each row's values on the way to it, as a column of that head's output.
        near: parameters further down; empty if they were not looked for.
    """

    nearest: Key
    chosen: frozenset[tuple[str, int, int]]
    near: frozenset[Key] = frozenset()

    def is_of(self, term: LossTerm) -> bool:
        """Whether a term of another micro-batch comes from there, too; see `is_one_with`."""
        other = origin_of(term)
        return other == self._replace(near=frozenset()) or self.is_one_with(origin_of(term, further=True))

    def is_one_with(self, other: "Origin") -> bool:
        """Whether two terms come from one place: perhaps one of them by way of what only some rows have."""
        if not other.nearest or not self.nearest or other[:2] == self[:2]:
            return True
        if other.nearest not in self.near and self.nearest not in other.near:
            return False
        return other.chosen <= self.chosen or self.chosen <= other.chosen


def origin_of(term: LossTerm, *, further: bool = False) -> Origin:
    """Where a term comes from; with `further` the parameters below the nearest one are looked for, too."""
    end = term.end.node if isinstance(term.end, Edge) else term.end
    seen, edges = set[Any](), [(end, 0)] if end else []
    nearest, chosen, near, left = 0, [], set[int](), _NEAR
    while edges:
        for node, output in edges:
            if kind_of(node) == LEAF:
                if isinstance(node.variable, nn.Parameter):
                    nearest = nearest or id(node.variable)
                    near.add(id(node.variable))
            elif not nearest:
                chosen.append(chosen_by(node, output))
        left = min(left - 1, _FURTHER if further else 0) if nearest else left - 1
        if not left:
            break
        seen.update(node for node, _ in edges)
        below = (edge for node, _ in edges for edge in node.next_functions)
        edges = list(dict.fromkeys(edge for edge in below if edge[0] is not None and edge[0] not in seen))
    return Origin(nearest, frozenset(chosen) - {None}, frozenset(near if further else ()))


def source_of(term: LossTerm, *, by_choice: bool = False) -> int:
    """A key for a term's origin: the nearest parameter, or that and what is chosen on the way; 0 if none is near."""
    origin = origin_of(term)
    return hash(origin) if by_choice and origin.nearest else hash(origin.nearest)


class ParameterNames(Mapping[Key, str]):
    """The names of a module's parameters by their `id`: keys that are the same on all ranks.

    A parameter that FSDP2 has gathered has its shard's name.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names: dict[Key, str] = {id(weight): name for name, weight in module.named_parameters()}
        for gathered, shard in gathered_parameters(module):
            if id(shard) in self._names:
                self._names[id(gathered)] = self._names[id(shard)]

    def __getitem__(self, key: Key) -> str:
        return self._names[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def named(self, origin: Origin) -> Origin:
        """An origin with names in the place of ids; what has no name is left out."""
        near = frozenset(self[key] for key in origin.near if key in self)
        return Origin(self.get(origin.nearest, ""), origin.chosen, near)

"""Names of a loss's terms: those of their graphs, and the nearest parameter's where several terms have one graph."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch.nn import Parameter

from lightning_memkit.micro_batching.graph.graph_nodes import LEAF, chosen_by, kind_of
from lightning_memkit.micro_batching.graph.loss_terms import Edge, LossTerm, LossTerms

SOURCE = " of head "  # between a term's name and the number of its source
COLUMN = "Column"  # in the name of a term that is one column of a vector of quotients
_NEAR, _FURTHER = 32, 8  # levels of nodes down to the nearest parameter, and below it


def by_name(
    terms: Sequence[LossTerm],
    renamed: Mapping[str, str] = MappingProxyType({}),
    sources: Mapping[tuple[str, int], str] = MappingProxyType({}),
) -> dict[str, list[LossTerm]]:
    """Group terms by name, or by the name that `renamed` has for theirs, or `sources` for theirs and its source."""
    named: dict[str, list[LossTerm]] = defaultdict(list)
    told_apart = {name for name, _ in sources}
    for term in terms:
        name = renamed.get(term.name, term.name)
        if name in told_apart:
            told = sources.get((name, source_of(term)))
            name = told or sources.get((name, source_of(term, by_choice=True)), name)
        named[name].append(term)
    return named


def has_columns(names: Iterable[str]) -> bool:
    """Whether some terms are columns of a vector of quotients, by their names."""
    return any(f"/{COLUMN}/" in name for name in names)


class Origin(NamedTuple):
    """Where a term comes from, to tell the terms of several tasks apart.

    Args:
        nearest: the id of the nearest parameter, as of the head that the term judges; 0 if none is near.
        chosen: what is chosen of each row's values on the way to it, as a column of that head's output.
        near: the ids of parameters further down; empty if they were not looked for.
    """

    nearest: int
    chosen: frozenset[tuple[str, int, int]]
    near: frozenset[int] = frozenset()

    def is_of(self, term: LossTerm) -> bool:
        """Whether a term of another micro-batch comes from there, too: perhaps by way of what only some rows have."""
        other = origin_of(term)
        if not other.nearest or not self.nearest or other == self._replace(near=frozenset()):
            return True
        if other.nearest not in self.near and self.nearest not in origin_of(term, further=True).near:
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
                if isinstance(node.variable, Parameter):
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
    return hash(origin) if by_choice and origin.nearest else origin.nearest


def sources_of(
    seen: Sequence[LossTerms],
    renamed: Mapping[str, str],
    known: Mapping[tuple[str, int], str],
    apart: str,
) -> dict[tuple[str, int], str]:
    """Names for terms of one name that some of these rows lack: each by the parameter that is nearest to it.

    Two heads with one kind of loss, each added where a row has a label for it, are two terms; so are two columns
    of one head's output.

    Args:
        seen: the losses of some rows, and of their micro-batches.
        renamed: as for `by_name`.
        known: the names that sources have told so far, which are kept.
        apart: the name of terms that are to be told apart in any case.
    """
    sources = dict(known)
    named = [by_name(one.terms, renamed, sources) for one in seen]
    for name in dict.fromkeys(name for names in named for name in names):
        terms = [names.get(name, []) for names in named]
        is_lacked = len(set(map(len, terms))) > 1 or name == apart
        if not is_lacked or max(map(len, terms)) <= 1:
            continue
        for by_choice in (False, True):
            whole, *parts = [[source_of(term, by_choice=by_choice) for term in of_one] for of_one in terms]
            is_told = all(len({*one} - {0}) == len(one) for one in (whole, *parts))
            # Rows that a step adds up one by one may be chosen, too: their numbers in a micro-batch are others.
            if is_told and not (by_choice and {*whole} != {source for part in parts for source in part}):
                for source in dict.fromkeys(source for one in (whole, *parts) for source in one):
                    sources[name, source] = f"{name}{SOURCE}{len(sources)}"
                break
    return sources

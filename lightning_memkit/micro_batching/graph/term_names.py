"""Names of a loss's terms: those of their graphs, and the nearest parameter's where several terms have one graph."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from lightning_memkit.micro_batching.graph.loss_terms import Edge, LossTerm, LossTerms

SOURCE = " of head "  # between a term's name and the number of its source
_NEAR = 32  # nodes on the way down to a parameter


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
            name = sources.get((name, source_of(term)), name)
        named[name].append(term)
    return named


def source_of(term: LossTerm) -> int:
    """The id of the parameter that is nearest to a term, as of the head that it judges; 0 if none is near."""
    seen, nodes = set[Any](), [node.node if isinstance(node, Edge) else node for node in (term.end,) if node]
    for _ in range(_NEAR):
        for node in nodes:
            if hasattr(node, "variable"):
                return id(node.variable)
        seen.update(nodes)
        below = (child for node in nodes for child, _ in node.next_functions)
        nodes = list(dict.fromkeys(child for child in below if child is not None and child not in seen))
    return 0


def sources_of(
    seen: Sequence[LossTerms],
    renamed: Mapping[str, str],
    known: Mapping[tuple[str, int], str],
    apart: str,
) -> dict[tuple[str, int], str]:
    """Names for terms of one name that some of these rows lack: each by the parameter that is nearest to it.

    Two heads with one kind of loss, each added where a row has a label for it, are two terms.

    Args:
        seen: the losses of some rows, and of their micro-batches.
        renamed: as for `by_name`.
        known: the names that sources have told so far, which are kept.
        apart: the name of terms that are to be told apart in any case.
    """
    sources = dict(known)
    named = [by_name(one.terms, renamed, sources) for one in seen]
    for name in dict.fromkeys(name for names in named for name in names):
        own = [[source_of(term) for term in names.get(name, ())] for names in named]
        is_told = all(len({*one} - {0}) == len(one) for one in own)
        is_lacked = len(set(map(len, own))) > 1 or name == apart
        if is_lacked and max(map(len, own)) > 1 and is_told:
            for source in dict.fromkeys(source for one in own for source in one):
                sources[name, source] = f"{name}{SOURCE}{len(sources)}"
    return sources

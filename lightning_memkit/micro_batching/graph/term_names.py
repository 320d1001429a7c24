"""Names of a loss's terms: those of their graphs, and the nearest parameter's where several terms have one graph."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch.nn import Parameter

from lightning_memkit.micro_batching.graph.graph_nodes import chosen_by
from lightning_memkit.micro_batching.graph.loss_terms import Edge, LossTerm, LossTerms

SOURCE = " of head "  # between a term's name and the number of its source
COLUMN = "Column"  # in the name of a term that is one column of a vector of quotients
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
            told = sources.get((name, source_of(term)))
            name = told or sources.get((name, source_of(term, by_choice=True)), name)
        named[name].append(term)
    return named


def has_columns(names: Iterable[str]) -> bool:
    """Whether some terms are columns of a vector of quotients, by their names."""
    return any(f"/{COLUMN}/" in name for name in names)


def source_of(term: LossTerm, *, by_choice: bool = False) -> int:
    """The id of the parameter that is nearest to a term, as of the head that it judges; 0 if none is near.

    With `by_choice` it is a hash of this id and of what is chosen of each row's values on the way: of several
    tasks that one head judges, each has its column.
    """
    end = term.end.node if isinstance(term.end, Edge) else term.end
    seen, edges, chosen = set[Any](), [(end, 0)] if end else [], []
    for _ in range(_NEAR):
        for node, output in edges:
            if isinstance(getattr(node, "variable", None), Parameter):
                return hash((id(node.variable), *chosen)) if by_choice else id(node.variable)
            chosen += [choice] if by_choice and (choice := chosen_by(node, output)) else []
        seen.update(node for node, _ in edges)
        below = (edge for node, _ in edges for edge in node.next_functions)
        edges = list(dict.fromkeys(edge for edge in below if edge[0] is not None and edge[0] not in seen))
    return 0


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

"""Names of a loss's terms: those of their graphs, and the nearest parameter's where several terms have one graph."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from lightning_memkit.micro_batching.graph.loss_terms import LossTerm, LossTerms
from lightning_memkit.micro_batching.graph.origins import Key, origin_of, source_of

SOURCE = " of "  # between a term's name and that of its source
UNNAMED = "?"  # begins the name of a source that is no parameter of the module
COLUMN = "Column"  # in the name of a term that is one column of a vector of quotients


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


def without_source(name: str) -> tuple[str, str]:
    """The name that a term has in its graph, and that of its source, empty if nothing had to tell it apart."""
    graph_name, _, source = name.partition(SOURCE)
    return graph_name, source


def has_columns(names: Iterable[str]) -> bool:
    """Whether some terms are columns of a vector of quotients, by their names."""
    return any(f"/{COLUMN}/" in name for name in names)


def sources_of(
    seen: Sequence[LossTerms],
    renamed: Mapping[str, str],
    known: Mapping[tuple[str, int], str],
    apart: str,
    parameters: Mapping[Key, str],
) -> dict[tuple[str, int], str]:
    """Names for terms of one name that some of these rows lack: each by the parameter that is nearest to it.

    Two heads with one kind of loss, each added where a row has a label for it, are two terms; so are two columns
    of one head's output.

    Args:
        seen: the losses of some rows, and of their micro-batches.
        renamed: as for `by_name`.
        known: the names that sources have told so far, which are kept.
        apart: the name of terms that are to be told apart in any case.
        parameters: the names of parameters by their `id`, by which ranks know a source of each other.
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
            origins = {
                source_of(term, by_choice=by_choice): origin_of(term) for of_one in terms for term in of_one
            }
            is_told = all(len({*one} - {0}) == len(one) for one in (whole, *parts))
            # Rows that a step adds up one by one may be chosen, too: their numbers in a micro-batch are others.
            if is_told and not (by_choice and {*whole} != {source for part in parts for source in part}):
                for source in dict.fromkeys(source for one in (whole, *parts) for source in one):
                    origin = origins[source]
                    of = repr(parameters.get(origin.nearest, f"{UNNAMED}{len(sources)}"))
                    chosen = f" {sorted(origin.chosen)}" if by_choice else ""
                    sources[name, source] = f"{name}{SOURCE}{of}{chosen}"
                break
    return sources


def are_named(names: Iterable[str]) -> bool:
    """Whether other ranks know the sources of these terms by the terms' names."""
    return not any(f"{SOURCE}'{UNNAMED}" in name for name in names)

"""Which operators of a block to keep, exactly: minimum cuts give the fewest bytes for each price of a second.

An operator that is made again needs its inputs kept or made again, and autograd needs so what it saves. Where a second
costs so many bytes, the best choice under these rules is a minimum cut, as in torch's partitioner of compiled graphs
(`torch._functorch.partitioners`; Chen et al. 2016, arXiv:1604.06174, has the problem). Cuts at all prices give the
lower convex hull of bytes over seconds: no choice lies below it, and one for each of several blocks comes close to it.
"""

from functools import lru_cache

from lightning_memkit.activations.profiling import OperatorCost

_MOST_CUTS = 64
_MOST_OPERATORS = 400

Point = tuple[float, float]  # seconds, bytes
Operators = tuple[OperatorCost, ...]


@lru_cache(maxsize=64)
def hull(operators: Operators, seconds: tuple[float, ...]) -> tuple[frozenset[int], ...]:
    """What to keep, for each price of a second at which that changes; none for a block of very many operators.

    Args:
        operators: those of a block.
        seconds: what making each of them again takes.
    """
    if len(operators) > _MOST_OPERATORS or not any(seconds):
        return ()
    ends = [_cut(operators, seconds, price) for price in (0.0, _dearest(operators, seconds))]
    found = [keep for keep, _ in ends]
    waiting = [(ends[0][1], ends[1][1])]
    while waiting and len(found) < _MOST_CUTS:
        slow, quick = waiting.pop(0)
        if slow[0] <= quick[0] or quick[1] <= slow[1]:
            continue
        price = (quick[1] - slow[1]) / (slow[0] - quick[0])
        keep, between = _cut(operators, seconds, price)
        if between[1] + price * between[0] < (slow[1] + price * slow[0]) * (1 - 1e-9):
            found.append(keep)
            waiting += [(slow, between), (between, quick)]
    return tuple(found)


def _dearest(operators: Operators, seconds: tuple[float, ...]) -> float:
    """A price of a second at which nothing is worth making again, but what can't be kept."""
    everything = sum(sum(operator.sizes) for operator in operators)
    return 2 * everything / min(second for second in seconds if second > 0)


def _cut(operators: Operators, seconds: tuple[float, ...], price: float) -> tuple[frozenset[int], Point]:
    """What to keep where a second costs `price` bytes, and the seconds and bytes of that."""
    import networkx  # which torch requires; it takes a tenth of a second to import

    graph = networkx.DiGraph()
    graph.add_nodes_from("st")
    for index, operator in enumerate(operators):
        again = index, -1
        # On the source's side an operator is made again, and an output is there when it is needed.
        gain = sum(size for position, size in enumerate(operator.sizes) if not operator.is_lost(position))
        cost = round(price * seconds[index]) - gain
        if operator.pinned:
            graph.add_edge(again, "t")
        elif cost > 0:
            graph.add_edge(again, "t", capacity=cost)
        elif cost < 0:
            graph.add_edge("s", again, capacity=-cost)
        for position, (size, saved) in enumerate(zip(operator.sizes, operator.saves, strict=True)):
            here = index, position
            graph.add_edge(again, here)
            if operator.is_lost(position):
                graph.add_edge(here, again)
            else:
                graph.add_edge(here, "t", capacity=size)
            if saved:
                graph.add_edge("s", here)
        for place in operator.inputs:
            graph.add_edge(again, place)
    _, (there, _) = networkx.minimum_cut(graph, "s", "t")
    made = {index for index in range(len(operators)) if (index, -1) in there}
    kept = [
        (index, position)
        for index, operator in enumerate(operators)
        for position in range(len(operator.sizes))
        if index not in made and (index, position) in there
    ]
    held = sum(operators[index].sizes[position] for index, position in kept)
    return frozenset(index for index, _ in kept), (sum(seconds[index] for index in made), held)

"""Draws the package's rooms and which imports which, from the code; `docs/pictures/rooms.svg` holds the drawing.

A room is a folder of the package, or its command line (see `benchmarks/house.py`).
`python -m benchmarks.house_picture` draws it again. Each room is below those that import it. An arrow that other
arrows imply is left out: where A imports B, and B imports C, that A also imports C is not drawn.

Mermaid would draw this in the browser, by a script that it loads from elsewhere, which our pages don't; Graphviz is no
Python package.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import networkx

import lightning_memkit
from benchmarks.house import ORDER, House

PACKAGE = Path(lightning_memkit.__file__).parent
PICTURE = PACKAGE.parent / "docs" / "pictures" / "rooms.svg"
BOX_WIDTH, BOX_HEIGHT, ROW_HEIGHT, GAP, MARGIN = 124, 30, 66, 26, 20
BEND_WIDTH = 8  # of an arrow that passes a row
SWEEPS = 24
STYLE = """
rect.paper { fill: #fff }
rect.room { fill: #e8eaf6; stroke: #3f51b5 }
text { font: 14px sans-serif; fill: #1a1a1a; text-anchor: middle }
path.arrow { fill: none; stroke: #555; stroke-width: 1.3; marker-end: url(#head) }
marker path { fill: #555 }
""".strip()

Node = str | tuple[str, str, int]  # a room, or where an arrow between two rooms passes a row
Row = list[Node]


def picture(house: House) -> str:
    """Draw the house as SVG; the same code gives the same text."""
    arrows = networkx.transitive_reduction(_imports(house))
    rows, links = _rows(arrows)
    rows = _with_few_crossings(rows, links)
    places = _places(rows, links)
    left = min(x - _width(node) // 2 for node, (x, _) in places.items()) - MARGIN
    places = {node: (x - left, y) for node, (x, y) in places.items()}
    width = max(x + _width(node) // 2 for node, (x, _) in places.items()) + MARGIN
    height = len(rows) * ROW_HEIGHT - (ROW_HEIGHT - BOX_HEIGHT) + 2 * MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">',
        f"<style>\n{STYLE}\n</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z"/></marker></defs>',
        f'<rect class="paper" width="{width}" height="{height}" rx="6"/>',
        *(
            _arrow(source, target, rows, places)
            for source, target in sorted(arrows.edges, key=lambda e: tuple(map(ORDER.index, e)))
        ),
        *(_box(room, *places[room]) for room in ORDER if room in places),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _imports(house: House) -> networkx.DiGraph:
    graph = networkx.DiGraph()
    graph.add_nodes_from(room for room in ORDER if room in {*house.rooms, "cli"})
    graph.add_edges_from((source, target) for source, target in house.imports_of_rooms if source != target)
    return graph


def _rows(arrows: networkx.DiGraph) -> tuple[list[Row], list[tuple[Node, Node]]]:
    """Rows of rooms by the longest chain of imports below them, with bends where arrows pass a row; and the links."""
    heights: dict[str, int] = {}
    for room in reversed(list(networkx.topological_sort(arrows))):
        heights[room] = 1 + max((heights[below] for below in arrows.successors(room)), default=-1)
    top = max(heights.values())
    rows: list[Row] = [[] for _ in range(top + 1)]
    for room in sorted(heights, key=ORDER.index):
        rows[top - heights[room]].append(room)
    links: list[tuple[Node, Node]] = []
    for source, target in sorted(arrows.edges):
        way: list[Node] = [source]
        for row in range(top - heights[source] + 1, top - heights[target]):
            way.append((source, target, row))
            rows[row].append(way[-1])
        links += zip(way, [*way[1:], target], strict=True)
    return rows, links


def _with_few_crossings(rows: list[Row], links: list[tuple[Node, Node]]) -> list[Row]:
    """Sort rows by the mean place of neighbours, in sweeps down and up (Sugiyama's barycentres); the best sweep."""
    above, below = _neighbours(links)
    best, fewest = rows, _crossings(rows, below)
    for sweep in range(SWEEPS):
        rows = [list(row) for row in rows]
        order, beside = (
            (range(1, len(rows)), above) if sweep % 2 == 0 else (range(len(rows) - 2, -1, -1), below)
        )
        for index in order:
            near = rows[index - 1 if sweep % 2 == 0 else index + 1]
            at = {node: place for place, node in enumerate(near)}
            rows[index].sort(key=lambda node, at=at, beside=beside: _mean(at[one] for one in beside[node]))
        if (count := _crossings(rows, below)) < fewest:
            best, fewest = rows, count
    return best


def _crossings(rows: list[Row], below: dict[Node, list[Node]]) -> int:
    count = 0
    for row, under in zip(rows, rows[1:], strict=False):
        at = {node: place for place, node in enumerate(under)}
        ends = [(place, at[one]) for place, node in enumerate(row) for one in below[node]]
        count += sum(a < c and b > d for a, b in ends for c, d in ends)
    return count


def _places(rows: list[Row], links: list[tuple[Node, Node]]) -> dict[Node, tuple[int, int]]:
    """The middle of each node: near the mean of its neighbours, in its row's order, and apart."""
    above, below = _neighbours(links)
    x: dict[Node, float] = {}
    for row in rows:
        for place, node in enumerate(row):
            x[node] = (place - (len(row) - 1) / 2) * (BOX_WIDTH + GAP)
    for _ in range(SWEEPS):
        for row in [*rows, *reversed(rows)]:
            wanted = [_mean((x[one] for one in (*above[node], *below[node])), x[node]) for node in row]
            x.update(zip(row, _apart(row, wanted), strict=True))
    return {
        node: (round(x[node]), MARGIN + BOX_HEIGHT // 2 + index * ROW_HEIGHT)
        for index, row in enumerate(rows)
        for node in row
    }


def _apart(row: Row, wanted: list[float]) -> list[float]:
    """Places in the row's order with room between them: the mean of pushing to the right and to the left."""
    space = [(_width(a) + _width(b)) / 2 + GAP for a, b in zip(row, row[1:], strict=False)]
    right, left = list(wanted), list(wanted)
    for index, least in enumerate(space):
        right[index + 1] = max(right[index + 1], right[index] + least)
    for index, least in reversed(list(enumerate(space))):
        left[index] = min(left[index], left[index + 1] - least)
    return [(a + b) / 2 for a, b in zip(right, left, strict=True)]


def _arrow(source: str, target: str, rows: list[Row], places: dict[Node, tuple[int, int]]) -> str:
    bends = [node for row in rows for node in row if isinstance(node, tuple) and node[:2] == (source, target)]
    x, y = places[source]
    path = f"M{x} {y + BOX_HEIGHT // 2}"
    y += BOX_HEIGHT // 2
    for node in [*bends, target]:
        to_x, middle = places[node]
        to_y = middle - BOX_HEIGHT // 2
        path += f" C{x} {(y + to_y) // 2} {to_x} {(y + to_y) // 2} {to_x} {to_y}"
        x, y = to_x, to_y
        if node != target:
            y = middle + BOX_HEIGHT // 2
            path += f" L{x} {y}"
    return f'<path class="arrow" d="{path}"><title>{source} imports {target}</title></path>'


def _box(room: str, x: int, y: int) -> str:
    left, top = x - BOX_WIDTH // 2, y - BOX_HEIGHT // 2
    return (
        f'<rect class="room" x="{left}" y="{top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="4"/>'
        f'<text x="{x}" y="{y}" dy=".35em">{room}</text>'
    )


def _neighbours(links: list[tuple[Node, Node]]) -> tuple[dict[Node, list[Node]], dict[Node, list[Node]]]:
    above, below = defaultdict[Node, list[Node]](list), defaultdict[Node, list[Node]](list)
    for source, target in links:
        below[source].append(target)
        above[target].append(source)
    return above, below


def _width(node: Node) -> int:
    return BOX_WIDTH if isinstance(node, str) else BEND_WIDTH


def _mean(values: Iterable[float], otherwise: float = 0.0) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else otherwise


def main() -> int:
    """Write the picture, and say where."""
    PICTURE.write_text(picture(House(PACKAGE)), encoding="utf-8")
    print(f"written to {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The package as a house, counted: its lines, rooms, circles, imports upward, long files and signatures.

A room is a folder of the package. `ORDER` has the rooms from the top to the bottom: each imports those after it only,
also within functions. An import within a function hides a circle, and counts as one outside of it does.
"""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import networkx

import lightning_memkit
from benchmarks.__main__ import main_of
from benchmarks.harness import Options, Report

ORDER = (
    "cli", "plugins", "planning", "prediction", "attention", "initialization", "micro_batching",
    "distributed", "optim", "testing", "data", "loss", "activations", "checkpoints", "memory", "utilities",
)  # fmt: skip
AT_THE_TOP = {"__init__", "cli"}
COUNTED = (".py", ".cpp", ".js", ".css", ".html", ".json")
LONG_FILE, LONG_SIGNATURE = 300, 6
PUBLIC = {*lightning_memkit.__all__, *(f"{name}.__init__" for name in lightning_memkit.__all__)}


def run(options: Options) -> Report:
    """Seconds; nothing is timed."""
    house = House(Path(lightning_memkit.__file__).parent)
    rows = house.rows()
    figures: dict[str, float | int | bool] = {
        "lines": sum(int(str(row["lines"])) for row in rows),
        "plugins_lines": sum(int(str(row["lines"])) for row in rows if row["room"] == "plugins"),
        "rooms": len(house.rooms),
        "loose_modules": len(house.loose),
        "circles": len(house.circles),
        "files_in_circles": sum(map(len, house.circles)),
        "deferred_imports": len(house.deferred),
        "upward": len(house.upward),
        "files_over_300": len(house.long_files),
        "names_twice": len(house.names_twice),
        "long_signatures": len(house.long_signatures),
    }
    notes = [
        *(f"upward: {source} imports {target}" for source, target in house.upward),
        *(f"circle: {', '.join(circle)}" for circle in house.circles),
        *(f"deferred: {source} imports {target}" for source, target in house.deferred),
        *(
            f"twice: class {name} in {', '.join(places)}"
            for name, places in sorted(house.names_twice.items())
        ),
        *(f"long: {name}, {count} lines" for name, count in house.long_files),
        *(f"signature: {name}, {count} parameters" for name, count in house.long_signatures),
    ]
    return Report("house", figures, rows, notes=tuple(notes))


class House:
    """A package, read from its files and not imported.

    Args:
        folder: the package's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._name = folder, folder.name
        self.files = {
            ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__"): path
            for path in sorted(folder.rglob("*.py"))
        }
        self.trees = {
            module: ast.parse(path.read_text(encoding="utf-8")) for module, path in self.files.items()
        }
        self.rooms = sorted({path.parent.name for path in folder.glob("*/__init__.py")})
        self.loose = sorted({path.stem for path in folder.glob("*.py")} - AT_THE_TOP)

    def room_of(self, module: str) -> str:
        """The room that a module lies in, or its own name at the top."""
        return module.split(".")[1] if "." in module else "__init__"

    def rows(self) -> list[dict[str, object]]:
        """A row a room: its files, their lines, and the rooms that it imports."""
        files, lines = Counter[str](), Counter[str]()
        for path in self.folder.rglob("*"):
            if path.suffix in COUNTED and "__pycache__" not in path.parts:
                first = path.relative_to(self.folder).parts[0].removesuffix(".py")
                files[first] += 1
                lines[first] += len(path.read_text(encoding="utf-8").splitlines())
        imports = defaultdict[str, set[str]](set)
        for source, target in self._room_imports:
            imports[source].add(target)
        return [
            {
                "room": room,
                "files": files[room],
                "lines": lines[room],
                "imports": " ".join(sorted(imports[room] - {room})),
            }
            for room in sorted(files, key=lambda room: -lines[room])
        ]

    @property
    def imports_of_rooms(self) -> set[tuple[str, str]]:
        """Which room imports which other; the package's own file is none."""
        return {pair for pair in self._room_imports if len({*pair}) == 2 and "__init__" not in pair}

    @cached_property
    def _room_imports(self) -> set[tuple[str, str]]:
        return {(self.room_of(source), self.room_of(target)) for source, target, _ in self._imports}

    @cached_property
    def _imports(self) -> list[tuple[str, str, bool]]:
        """Who imports whom, and whether within a function; also for types alone, which hides a circle as well.

        The package's own lazy names are none: they are for type checkers what they are for users.
        """
        return [
            (module, target, deferred)
            for module, tree in self.trees.items()
            if module != self._name
            for name, deferred in _imported(tree)
            for target in [self._module(name)]
            if target and target != module
        ]

    def _module(self, name: str) -> str:
        """The module of the package that a dotted name stands for; empty for others."""
        if name.split(".")[0] != self._name:
            return ""
        return (
            name
            if name in self.files
            else name.rpartition(".")[0]
            if name.rpartition(".")[0] in self.files
            else ""
        )

    @cached_property
    def circles(self) -> list[list[str]]:
        """Modules that import each other, within functions or not."""
        graph = networkx.DiGraph(
            (source, target)
            for source, target, _ in self._imports
            if target != self._name  # its version
        )
        found = [
            sorted(circle) for circle in networkx.strongly_connected_components(graph) if len(circle) > 1
        ]
        return sorted(found, key=len, reverse=True)

    @cached_property
    def deferred(self) -> list[tuple[str, str]]:
        """Imports of the package's own modules within functions; the command's are there to start fast."""
        return sorted(
            {
                (source, target)
                for source, target, deferred in self._imports
                if deferred and self.room_of(source) not in AT_THE_TOP
            }
        )

    @cached_property
    def upward(self) -> list[tuple[str, str]]:
        """Imports of a room that stands above in `ORDER`."""
        place = {room: index for index, room in enumerate(ORDER)}
        return sorted(
            {
                (source, target)
                for source, target, _ in self._imports
                if "__init__" not in (self.room_of(source), self.room_of(target))
                and place.get(self.room_of(source), -1) > place.get(self.room_of(target), -1)
            }
        )

    @cached_property
    def long_files(self) -> list[tuple[str, int]]:
        """Python files of more than 300 lines."""
        counts = {
            name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in self.files.items()
        }
        long = [(name, count) for name, count in counts.items() if count > LONG_FILE]
        return sorted(long, key=lambda one: -one[1])

    @cached_property
    def names_twice(self) -> dict[str, list[str]]:
        """Classes of one name in several modules."""
        places = defaultdict[str, list[str]](list)
        for module, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    places[node.name.lstrip("_")].append(module)
        return {name: found for name, found in places.items() if len(set(found)) > 1}

    @cached_property
    def long_signatures(self) -> list[tuple[str, int]]:
        """Functions of more than six parameters, but public ones, whose options are fixed, and Triton's kernels."""
        found = []
        for module, tree in self.trees.items():
            for name, node in _functions(tree):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = sum(argument.arg not in ("self", "cls") for argument in arguments)
                if count > LONG_SIGNATURE and name not in PUBLIC and not _is_kernel(node):
                    found.append((f"{module}.{name}", count))
        return sorted(found, key=lambda one: (-one[1], one[0]))


def _imported(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Dotted names, and whether they are imported within a function."""
    stack: list[tuple[ast.AST, bool]] = [(tree, False)]
    while stack:
        node, deferred = stack.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, deferred) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", deferred) for alias in node.names)
        else:
            inside = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            stack += [(child, inside) for child in ast.iter_child_nodes(node)]


def _functions(
    tree: ast.AST, within: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions and methods by their name, at any depth."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield within + node.name, node
        name = getattr(node, "name", "") if isinstance(node, ast.ClassDef | ast.FunctionDef) else ""
        yield from _functions(node, f"{within}{name}." if name else within)


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton" in ast.unparse(decorator) for decorator in node.decorator_list)


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))

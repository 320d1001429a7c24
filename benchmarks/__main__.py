"""List the benchmarks, or run one: a table, one line `RESULT {json}`, and a file in benchmarks/results/."""

import argparse
import ast
import importlib
import json
import sys
import time
from pathlib import Path

from benchmarks.harness import Options, Report
from benchmarks.record import RESULTS, checked_figures, record

FOLDER = Path(__file__).resolve().parent


def find_benchmarks(function: str = "run", folder: Path = FOLDER) -> dict[str, str]:
    """Return the benchmarks that define `function`, each with its first docstring line."""
    # Parsed, not imported: a list must not need what the benchmarks need.
    found = {}
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if not path.stem.startswith("_") and function in functions and path.stem != "gpu":
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def format_table(rows: list[dict[str, object]]) -> str:
    """Lay the rows out in columns; a column that any row lacks stays empty there."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([_cell(row.get(name, "")) for name in columns] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def show(report: Report) -> None:
    """Print table, notes, whether the run is void, and the RESULT line."""
    print(format_table(report.rows))
    for note in report.notes:
        print(f"note: {note}")
    if report.void:
        print("VOID: a step timed against itself is off by more than 1 %; run it again on a quieter machine.")
    print("RESULT " + json.dumps({**checked_figures(report), "void": report.void}), flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="?", help="the benchmark; none lists them")
    parser.add_argument(
        "--quick", action="store_true", help="a smaller run with the same figures, under 5 minutes"
    )
    parser.add_argument("--seed", type=int, default=0, help="seeds data, models and the order of the pairs")
    parser.add_argument(
        "--only", default="", help="run one named case and write no file (exactness, fault_sweep)"
    )
    parser.add_argument("--size", default="", help="run one micro-batch size, with --only (exactness)")
    parser.add_argument("--gpu", action="store_true", help="run the benchmark's rows for a GPU (`gpu_rows`)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    chosen = parser.parse_args(arguments)

    benchmarks = find_benchmarks("gpu_rows" if chosen.gpu else "run")
    if chosen.name is None:
        width = max(map(len, benchmarks), default=0)
        print("\n".join(f"{name:{width}}  {line}" for name, line in benchmarks.items()) or "no benchmarks")
        return 0
    if chosen.name not in benchmarks:
        kind = "GPU benchmark" if chosen.gpu else "benchmark"
        parser.error(f"no {kind} {chosen.name!r}; there are: {', '.join(benchmarks) or 'none'}")
    if chosen.gpu:
        return _run_gpu_rows(chosen)
    options = Options(quick=chosen.quick, seed=chosen.seed, only=chosen.only, size=chosen.size)
    start = time.perf_counter()
    report: Report = importlib.import_module(f"benchmarks.{chosen.name}").run(options)
    seconds = time.perf_counter() - start
    if options.only or options.size:  # a part of the figures must not pass for all
        print(f"{seconds:.0f} s; a part of the benchmark, written nowhere")
    else:
        path = record(report, options, seconds=seconds, on_gpu=False, folder=chosen.results)
        print(f"{seconds:.0f} s; written to {path}")
    show(report)
    return 1 if report.failed else 0


def main_of(file: str) -> int:
    """Run the benchmark in `file`: the last lines of each make `python -m benchmarks.NAME` a command too."""
    # `record` writes the arguments down: they have to be a command that can be repeated.
    sys.argv.insert(1, Path(file).stem)
    return main()


def _run_gpu_rows(chosen: argparse.Namespace) -> int:
    """The rows of one benchmark, as `python -m benchmarks.gpu` runs them all."""
    from benchmarks import gpu

    quick = ["--quick"] if chosen.quick else []
    arguments = [*quick, "--seed", str(chosen.seed), "--results", str(chosen.results)]
    return gpu.main(["--only", chosen.name, *arguments])


def _cell(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())

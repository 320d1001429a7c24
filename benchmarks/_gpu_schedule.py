"""Which rows run in which order, and for how long each of them may."""

import importlib
from collections.abc import Sequence
from typing import Any

from benchmarks._gpu_rows import GpuRow, Values
from benchmarks._gpu_supervisor import Job
from benchmarks.harness import Options

# The most valuable first: claims that only a card can show and that take seconds a row, then what takes minutes, then
# what is known best from the CPU. At full size nine minutes are enough for a part: scripts/first_card.sh has three.
ORDER = (
    "optimizer_step",
    "loss_head",
    "activations",
    "prediction",
    "budget",
    "optimizer_offload",
    "end_to_end",
    "attention",
)
PATIENCE = 2.0  # times its need that a row may take, even where not all rows have time
LEAST_SECONDS = 30.0  # that a row may take: first calls, and after a crash what earlier rows had made ready


def seconds_for(needs_seconds: Sequence[float], left_seconds: float) -> float | None:
    """How long the first of the rows to come may take; None where it can't finish in what is left.

    What is left is shared out by need, so a row that takes less leaves more to those after it. Where it is too little
    for all, earlier rows still get what they need.

    Args:
        needs_seconds: of the row and of all after it.
        left_seconds: for all of them together.
    """
    need = needs_seconds[0]
    if need > left_seconds:
        return None
    scale = left_seconds / max(sum(needs_seconds), 1e-9)
    return min(left_seconds, max(need * max(scale, PATIENCE), LEAST_SECONDS))


def jobs_of(names: Sequence[str], options: Options, package: str = "benchmarks") -> list[Job]:
    """All rows of the benchmarks, in the order of these; one whose module fails is a single row that fails."""
    jobs = []
    for name in names:
        try:
            rows = rows_of(name, options, package)
        except Exception as error:
            rows = [GpuRow(what="its rows", needs_seconds=1, run=lambda error=error: _raise(error))]
        jobs += [Job(benchmark=name, row=row) for row in rows]
    return jobs


def rows_of(name: str, options: Options, package: str = "benchmarks") -> list[GpuRow]:
    """The rows of a benchmark.

    Raises:
        ValueError: two rows have one name.
    """
    module: Any = importlib.import_module(f"{package}.{name}")
    rows: list[GpuRow] = module.gpu_rows(options)
    names = [row.what for row in rows]
    twice = sorted({what for what in names if names.count(what) > 1})
    if twice:
        raise ValueError(f"Rows of {name} have one name: {', '.join(twice)}; give each its own.")
    return rows


def _raise(error: Exception) -> Values:
    raise error

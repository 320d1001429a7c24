"""What rows found, as it comes: a line on the screen, and a file a benchmark that is whole at every moment."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._gpu_supervisor import Job, Outcome
from benchmarks.harness import SELF_RATIO_TOLERANCE, Options
from benchmarks.record import describe_hardware, provenance, write_whole

SELF_RATIO = "self_ratio"  # the figure of a step timed against itself


class Results:
    """The outcomes of all rows.

    Args:
        jobs: the rows that are to come.
        options: of the command line.
        command: that repeats the run.
        folder: where each benchmark's file is written after each of its rows; None writes none.
    """

    def __init__(self, jobs: list[Job], options: Options, command: str, folder: Path | None) -> None:
        self.jobs, self._options, self._folder = jobs, options, folder
        self._command = command
        self._start = time.monotonic()
        self._provenance: dict[str, Any] | None = None
        self.outcomes: list[Outcome] = []

    def add(self, outcome: Outcome, hardware: dict[str, Any] | None) -> None:
        """Show a row and write its benchmark's file again."""
        twice = outcome.values.keys() & self._figures(outcome.job.benchmark).keys()
        if twice:
            why = f"another row has a figure {', '.join(sorted(twice))}"
            outcome = replace(outcome, kind="failed", why=why, values={})
        self.outcomes.append(outcome)
        print(f"[{time.monotonic() - self._start:5.0f} s] {_line(outcome)}", flush=True)
        if self._folder is not None:
            write_whole(self._content(outcome.job.benchmark, hardware), self._folder)

    def figures(self) -> dict[str, float | int | bool]:
        """All figures as `<benchmark>_<figure>`, in six digits, and whether a benchmark is void."""
        found: dict[str, float | int | bool] = {}
        for name in dict.fromkeys(outcome.job.benchmark for outcome in self.outcomes):
            figures = self._figures(name)
            found |= {f"{name}_{figure}": _rounded(value) for figure, value in figures.items()}
            if SELF_RATIO in figures:
                found[f"{name}_void"] = _is_void(figures)
        return found

    def summary(self) -> str:
        """How many rows came to what, and each that did not go well."""
        counts: dict[str, int] = {}
        for outcome in self.outcomes:
            counts[outcome.kind] = counts.get(outcome.kind, 0) + 1
        bad = [f"{_name(one.job)}: {one.kind}, {one.why}" for one in self.outcomes if not one.passes]
        return "\n".join([*bad, "rows: " + ", ".join(f"{count} {kind}" for kind, count in counts.items())])

    def _figures(self, benchmark: str) -> dict[str, float | int | bool]:
        of_it = [outcome for outcome in self.outcomes if outcome.job.benchmark == benchmark]
        return {
            name: value
            for outcome in of_it
            for name, value in outcome.values.items()
            if not isinstance(value, str)
        }

    def _content(self, benchmark: str, hardware: dict[str, Any] | None) -> dict[str, Any]:
        if self._provenance is None or hardware is not None:  # once: git and package lists take a moment
            known = hardware or _unknown_hardware(self._options)
            if self._provenance is None or self._provenance["hardware"] != known:
                self._provenance = provenance(self._command, self._options, known)
        of_it = [outcome for outcome in self.outcomes if outcome.job.benchmark == benchmark]
        expected = sum(job.benchmark == benchmark for job in self.jobs)
        figures = self._figures(benchmark)
        return {
            "name": benchmark,
            "quick": self._options.quick,
            "void": _is_void(figures),
            "figures": figures,
            "rows": [_table_row(outcome) for outcome in of_it],
            "notes": [f"{expected - len(of_it)} rows had not been run"] if len(of_it) < expected else [],
            **self._provenance,
            "seconds": round(sum(outcome.seconds for outcome in of_it), 1),
        }


def _unknown_hardware(options: Options) -> dict[str, Any]:
    """Of a machine on which no process for rows has started: its GPU has no name then."""
    found = describe_hardware(on_gpu=False)
    return {**found, "slug": f"gpu-of-{found['slug']}"} if options.device == "cuda" else found


def _is_void(figures: dict[str, float | int | bool]) -> bool:
    return abs(figures.get(SELF_RATIO, 1.0) - 1) > SELF_RATIO_TOLERANCE


def _table_row(outcome: Outcome) -> dict[str, object]:
    """The same columns for every row: the figures themselves are listed beside."""
    return {
        "what": outcome.job.row.what,
        "result": outcome.kind + (f": {outcome.why}" if outcome.why else ""),
        "found": _found(outcome),
        "limits": ", ".join(f"{name} {limit}" for name, limit in outcome.job.row.limits.items()),
        "seconds": round(outcome.seconds, 1),
        "needs_seconds": outcome.job.row.needs_seconds,
    }


def _line(outcome: Outcome) -> str:
    text = f"{_name(outcome.job)}: {outcome.kind}"
    text += f", {outcome.seconds:.1f} s (needs {outcome.job.row.needs_seconds:g})" if outcome.seconds else ""
    return text + (f": {outcome.why}" if outcome.why else "") + f"  {_found(outcome)}".rstrip()


def _name(job: Job) -> str:
    return f"{job.benchmark}: {job.row.what}"


def _found(outcome: Outcome) -> str:
    return ", ".join(
        f"{name} {_rounded(value) if not isinstance(value, str) else value}"
        for name, value in outcome.values.items()
    )


def _rounded(value: float | int | bool) -> float | int | bool:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def result_line(figures: dict[str, float | int | bool]) -> str:
    """The command's last line."""
    return "RESULT " + json.dumps(figures)


def folder_is(folder: Path, other: Path) -> bool:
    """Whether two paths name one folder."""
    return os.path.realpath(folder) == os.path.realpath(other)

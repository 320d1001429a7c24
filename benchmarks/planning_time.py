"""What plans cost before anything runs: processor time of the whole command, and that shortcuts change no byte.

Five plans and predictions of Llama shapes for GPUs that are not here, each in a process of its own, whose processor
time counts, that of its forks and its imports included. A prediction takes shortcuts: few of many equal chunks or
slices run. The smallest plan and the prediction of 8 billion parameters are made without them, too, and no predicted
byte may differ.

Quick runs take the smallest plan and the prediction.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.__main__ import main_of
from benchmarks._plans_apart import CASES
from benchmarks.harness import Options, Report

ROOT = Path(__file__).parents[1]
QUICK = ("100m", "predict_8b")
CHECKED = ("100m", "predict_8b")  # without shortcuts, too


def run(options: Options) -> Report:
    """Time each in a process of its own; make the checked ones without shortcuts."""
    figures: dict[str, float | int | bool] = {}
    rows, largest = [], 0
    for name in QUICK if options.quick else CASES:
        found = _apart(name)
        figures[f"cpu_seconds_{name}"] = found["cpu_seconds"]
        row: dict[str, object] = {"what": name, "cpu_seconds": found["cpu_seconds"]}
        if name in CHECKED:
            whole = _apart(name, "whole")
            pairs = zip(found["bytes"], whole["bytes"], strict=True)
            difference = max(abs(one - other) for one, other in pairs)
            largest = max(largest, difference)
            row |= {"cpu_seconds_without_shortcuts": whole["cpu_seconds"], "byte_difference": difference}
        else:
            row |= {"cpu_seconds_without_shortcuts": "", "byte_difference": ""}
        rows.append(row)
    figures["byte_difference"] = largest
    return Report("planning_time", figures, rows, failed=largest > 0)


def _apart(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks._plans_apart", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))

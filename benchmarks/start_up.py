"""What MemoryBudget and MemoryReport add to the beginning of a run, in steps of plain Lightning.

The five models of `budget`, each trained for 24 steps under plain Lightning and under the plugins, in a process that
has imported everything; medians of five processes. `before_first_*` is what passes from building the Trainer to the
end of step 1, and `of_24_*` to the end of step 24, minus what plain Lightning takes, over its median step. `whole`
fits its budget; `parts` has six tenths of that; `report` is a MemoryReport. Nothing that an earlier run has found is
used. The figures are medians over the models, and the largest. A step of these models takes 5 to 90 ms on one thread.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from benchmarks.__main__ import main_of
from benchmarks._budget_models import cases
from benchmarks._start_up_runs import KINDS
from benchmarks.harness import Options, Report

ROOT = Path(__file__).parents[1]
RUNS = 5


def run(options: Options) -> Report:
    """Ten minutes; `--quick` takes one model, once."""
    rows: list[dict[str, object]] = []
    added: dict[str, list[float]] = {
        f"{when}_{kind}": [] for when in ("before_first", "of_24") for kind in KINDS
    }
    for index, case in enumerate(cases()):
        if options.quick and index:
            break
        runs = [_apart(index) for _ in range(1 if options.quick else RUNS)]
        step = median(one["step"] for one in runs)
        row: dict[str, object] = {"model": case.name, "step_ms": round(1000 * step, 1)}
        for name, values in added.items():
            values.append(median(one[name] for one in runs) / step)
            row[name] = round(values[-1], 1)
        rows.append(row)
    figures: dict[str, float | int | bool] = {}
    for name, values in added.items():
        figures |= {f"{name}_steps": median(values), f"{name}_steps_max": max(values)}
    return Report("start_up", figures, rows)


def _apart(index: int) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks._start_up_runs", str(index)]
    environment = {**os.environ, "MEMKIT_TUNING_CACHE": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"model {index} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))

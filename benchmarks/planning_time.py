"""What plans cost before anything runs: processor time of the whole command, and that shortcuts change no byte.

Five plans and predictions of Llama shapes for GPUs that are not here, each in a process of its own, whose processor
time counts, that of its forks and its imports included. A prediction takes shortcuts: few of many equal chunks or
slices run. The smallest plan and the prediction of 8 billion parameters are made without them, too, and no predicted
byte may differ.

Quick runs take the smallest plan and the prediction.
"""

import json
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Options, Report

ROOT = Path(__file__).parents[1]
QUICK = ("100m", "predict_8b")
CHECKED = ("100m", "predict_8b")  # without shortcuts, too


def as_given() -> dict[str, Any]:
    """A precision, a policy and a loss, so that offload and release are left to choose."""
    from lightning_memkit import ActivationCheckpointing, ChunkedLoss, PureBF16Precision

    return {"plugins": PureBF16Precision(), "callbacks": [ActivationCheckpointing("full"), ChunkedLoss()]}


def planned(shape: str, rows: int, budget: tuple[str, str], given: dict[str, Any]) -> list[int]:
    """The bytes of every configuration that was predicted."""
    from benchmarks.planning import ids_and_labels
    from benchmarks.prediction_ranks import Llama
    from lightning_memkit import Budget, plan

    found = plan(partial(Llama, shape), ids_and_labels(rows), Budget(*budget), trainer=given)
    return [row.taken_bytes for row in found.rows if row.taken_bytes]


def predicted() -> list[int]:
    """The bytes of one step of 8 billion parameters."""
    from benchmarks.planning import ids_and_labels
    from benchmarks.prediction_ranks import Llama
    from lightning_memkit import predict_memory

    made = predict_memory(partial(Llama, "8b"), ids_and_labels(1), trainer=as_given(), device="rtx4090")
    return [made.total_bytes, made.peak_bytes, made.host_bytes]


CASES: dict[str, Callable[[], list[int]]] = {
    "100m": lambda: planned("100m", 8, ("24GiB", "rtx4090"), as_given()),
    "8b": lambda: planned("8b", 1, ("24GiB", "rtx4090"), as_given()),
    "1b_open": lambda: planned("1b", 8, ("16GiB", "rtx4090"), {}),
    "70b_on_64": lambda: planned(
        "70b", 8, ("auto", "h100-80gb"), {**as_given(), "devices": 8, "num_nodes": 8}
    ),
    "predict_8b": predicted,
}


def run(options: Options) -> Report:
    """Time each in a process of its own; make the checked ones without shortcuts."""
    figures: dict[str, float | int | bool] = {}
    rows, largest = [], 0
    for name in QUICK if options.quick else CASES:
        found = _apart(name)
        figures[f"cpu_seconds_{name}"] = found["cpu_seconds"]
        row: dict[str, object] = {
            "what": name,
            "cpu_seconds": found["cpu_seconds"],
            "predictions": len(found["bytes"]),
        }
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
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.planning_time", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def without_shortcuts() -> Iterator[None]:
    """Within the context, predictions run every chunk and every slice."""
    from lightning_memkit.prediction import few_chunks, simulation
    from lightning_memkit.prediction.replaced import replaced

    with ExitStack() as stack:
        stack.enter_context(replaced(few_chunks, _RUN=sys.maxsize))
        stack.enter_context(replaced(simulation, few_slices=lambda most: nullcontext()))
        yield


def main(name: str, *whole: str) -> None:
    """One case, in this process."""
    warnings.simplefilter("ignore")
    with without_shortcuts() if whole else nullcontext():
        found = CASES[name]()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(one.ru_utime + one.ru_stime for one in used)
    print(json.dumps({"cpu_seconds": round(seconds, 2), "bytes": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])

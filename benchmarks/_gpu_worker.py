"""The process in which rows run, one after the other; `_gpu_supervisor.Worker` starts it, asks it and ends it.

A line of JSON comes in for each row and one goes out, through a pipe of its own: what a row prints goes to a log.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks._gpu_device import emptied
from benchmarks._gpu_rows import GpuRow, SkipRow
from benchmarks.harness import Options, Report
from benchmarks.record import checked_figures, describe_hardware

LEFT_BYTES = 1 << 30  # what a row may leave on the device; more would be missing to the next one


def main(pipe_end: int, package: str, options: Options) -> None:
    """Answer until no more rows come, or until the device is of no use to this process."""
    os.set_inheritable(pipe_end, False)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    warnings.simplefilter("ignore")
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    _send(pipe_end, {"hardware": describe_hardware(on_gpu=device.type == "cuda")})
    for line in sys.stdin:
        asked = json.loads(line)
        answer = run_row(lambda asked=asked: row_named(package, asked["benchmark"], asked["what"], options))
        answer["last"] = _is_spoiled(device)
        _send(pipe_end, answer)
        if answer["last"]:
            return


def row_named(package: str, benchmark: str, what: str, options: Options) -> GpuRow:
    """The row of a benchmark; imports it at its first use."""
    module: Any = importlib.import_module(f"{package}.{benchmark}")
    return next(row for row in module.gpu_rows(options) if row.what == what)


def run_row(find: Callable[[], GpuRow]) -> dict[str, Any]:
    """A row's values, or why there are none; whatever it raises stays here."""
    start = time.perf_counter()
    answer: dict[str, Any] = {}
    try:
        values = find().run()
        figures = {name: value for name, value in values.items() if not isinstance(value, str)}
        checked = checked_figures(Report("the row", figures, []))
        answer["values"] = {name: checked.get(name, value) for name, value in values.items()}
    except SkipRow as reason:
        answer["skipped"] = str(reason)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a row that exits is a row that failed
        traceback.print_exc()
        answer["failed"] = f"{type(error).__name__}: {_first_lines(str(error))}"
        # The frames of the traceback hold the row's tensors.
        traceback.clear_frames(error.__traceback__)
    answer["seconds"] = time.perf_counter() - start
    return answer


def _is_spoiled(device: torch.device) -> bool:
    """Whether an error of a kernel has spoiled CUDA's context, or a row has left much on the device."""
    try:
        return emptied(device) > LEFT_BYTES
    except Exception:  # torch has several types for it
        traceback.print_exc()
        return True


def _first_lines(text: str) -> str:
    return " ".join(text.split())[:500]


def _send(pipe_end: int, answer: dict[str, Any]) -> None:
    sys.stdout.flush()
    os.write(pipe_end, json.dumps(answer).encode() + b"\n")


def _end_with(parent: int) -> None:
    """End this process and those it has started once the one that asks is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Options(**json.loads(sys.argv[3])))

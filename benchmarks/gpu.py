"""Run every GPU benchmark in one call, in under 9 minutes.

Each benchmark with a `run_gpu(options)` runs in a process of its own: one that hangs, crashes or runs out of
memory costs its own result only. A benchmark gets an equal share of the time that is left, so what a short
one does not use goes to those after it. The last line is `RESULT {json}` with every figure as
`<benchmark>_<figure>`.

Exit codes: 0 all ran; 1 one failed or ran out of time; 2 there is no CUDA device and nothing was run.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.__main__ import find_benchmarks
from benchmarks.record import RESULTS, ROOT

TOTAL_SECONDS = 525.0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the quick form of each benchmark")
    parser.add_argument("--seed", type=int, default=0, help="passed to each benchmark")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these only")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="time for all of them together")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    chosen = parser.parse_args(arguments)

    available = find_benchmarks("run_gpu")
    unknown = sorted(set(chosen.only or ()) - set(available))
    if unknown:
        parser.error(f"no GPU benchmark {', '.join(unknown)}; there are: {', '.join(available) or 'none'}")
    if not _cuda_is_available():
        print("No CUDA device is present: no GPU benchmark was run.")
        return 2
    names = [name for name in available if name in (chosen.only or available)]
    passed_on = [
        *(["--quick"] if chosen.quick else []),
        "--seed",
        str(chosen.seed),
        "--results",
        str(chosen.results),
    ]
    return run_all(names, passed_on, total_seconds=chosen.seconds)


def run_all(names: list[str], arguments: list[str], *, total_seconds: float) -> int:
    """Run the benchmarks one after the other, print a summary and return the exit code."""
    deadline = time.monotonic() + total_seconds
    figures: dict[str, float | int | bool] = {}
    lines = []
    for index, name in enumerate(names):
        share = (deadline - time.monotonic()) / (len(names) - index)
        start = time.monotonic()
        print(f"== {name} (at most {share:.0f} s)", flush=True)
        outcome, output = run_one(
            [sys.executable, "-m", "benchmarks", name, "--gpu", *arguments], seconds=share
        )
        print(output, flush=True)
        result = _result_of(output)
        if outcome == "ok" and result is None:
            outcome = "failed: no RESULT line"
        figures |= {f"{name}_{key}": value for key, value in (result or {}).items()}
        lines.append(f"{name}: {outcome}, {time.monotonic() - start:.0f} s")
    print("\n".join(lines) or "No benchmark has a GPU part yet.")
    print("RESULT " + json.dumps(figures), flush=True)
    return 0 if all(": ok" in line for line in lines) else 1


def run_one(command: list[str], *, seconds: float) -> tuple[str, str]:
    """Run a command with a time limit; return `ok` or what went wrong, and its output."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=max(seconds, 1.0))
    except subprocess.TimeoutExpired:
        # The whole group: a loader's workers would otherwise keep the pipe and the device.
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return f"stopped after {seconds:.0f} s", output
    return ("ok" if process.returncode == 0 else f"failed with exit code {process.returncode}"), output


def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()


def _result_of(output: str) -> dict[str, float | int | bool] | None:
    found = [line for line in output.splitlines() if line.startswith("RESULT ")]
    return json.loads(found[-1].removeprefix("RESULT ")) if found else None


if __name__ == "__main__":
    raise SystemExit(main())

"""Run every GPU benchmark in one call, row by row, in under 9 minutes.

A row measures one thing. It is printed, and its benchmark's file is written, as soon as it is done; one that fails,
runs out of memory, crashes or hangs loses nothing else. Time is shared out by what rows need, the most valuable
first: a row that can't finish in what is left is left out, and shorter ones after it still run. The last line is
`RESULT {json}` with every figure as `<benchmark>_<figure>`.

Exit codes: 0 all rows ran, or can't run here, and all limits hold; 1 a limit is missed, a row failed, or one had no
time; 2 there is no CUDA device and nothing was run.
"""

import argparse
import shlex
import sys
import time
from pathlib import Path

from benchmarks._gpu_results import Results, folder_is, result_line
from benchmarks._gpu_schedule import ORDER, jobs_of, seconds_for
from benchmarks._gpu_supervisor import Job, Outcome, Supervisor
from benchmarks.harness import Options
from benchmarks.record import RESULTS

TOTAL_SECONDS = 525.0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same rows, fewer and smaller")
    parser.add_argument("--seed", type=int, default=0, help="seeds data, models and the order of pairs")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="the rows of these benchmarks only")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="time for all rows together")
    parser.add_argument(
        "--results", type=Path, help="folder of the result files; benchmarks/results by default"
    )
    # Runs the code of rows at tiny sizes, to see that it runs: no figure of it means anything.
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)

    unknown = sorted(set(chosen.only or ()) - set(ORDER))
    if unknown:
        parser.error(f"no GPU benchmark {', '.join(unknown)}; there are: {', '.join(ORDER)}")
    on_card = chosen.device == "cuda"
    if not on_card and chosen.results is not None and folder_is(chosen.results, RESULTS):
        parser.error("--device cpu measures nothing that may lie in benchmarks/results; name another folder")
    if on_card and not _cuda_is_available():
        print("No CUDA device is present: no GPU benchmark was run.")
        return 2
    options = Options(quick=chosen.quick, seed=chosen.seed, device=chosen.device)
    names = [name for name in ORDER if name in (chosen.only or ORDER)]
    given = sys.argv[1:] if arguments is None else arguments
    results = Results(
        jobs_of(names, options),
        options,
        shlex.join(["python", "-m", "benchmarks.gpu", *given]),
        chosen.results or (RESULTS if on_card else None),
    )
    return run_all(results, options, deadline=began + chosen.seconds)


def run_all(results: Results, options: Options, *, deadline: float, package: str = "benchmarks") -> int:
    """Run the rows one after the other, print a summary and return the exit code."""
    supervisor = Supervisor(package, options)
    try:
        for index, job in enumerate(results.jobs):
            needs = [later.row.needs_seconds for later in results.jobs[index:]]
            results.add(_run_one(supervisor, job, needs, deadline), supervisor.hardware)
    finally:
        supervisor.stop()
    print(results.summary())
    print(result_line(results.figures()), flush=True)
    return 0 if all(outcome.passes for outcome in results.outcomes) else 1


def _run_one(supervisor: Supervisor, job: Job, needs: list[float], deadline: float) -> Outcome:
    left = deadline - time.monotonic()
    if needs[0] <= left:
        why = supervisor.start(left)
        if why:
            return Outcome(job=job, kind="failed", why=why)
        left = deadline - time.monotonic()
    seconds = seconds_for(needs, left)
    if seconds is None:
        why = f"needs {needs[0]:g} s and {max(left, 0):.0f} s are left"
        return Outcome(job=job, kind="no time", why=why)
    return supervisor.run(job, seconds)


def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    raise SystemExit(main())

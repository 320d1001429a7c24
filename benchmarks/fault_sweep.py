"""Every allocation of a step in turn runs out of memory: how many of the runs end bitwise as they should.

A point is one allocation of one optimizer step: every storage that an operator creates (CPU), and every call of
the device "fake"'s allocator. After a run with a fault, weights, buffers, optimizer, RNG, learning rate,
global_step, the loader's position and the logged values are compared with a fault-free run that takes the
recorded partition from that step on; live bytes have to be back where that run's are. The control in the same
table is what users write: zero_grad, and the batch again. A run of two ranks has its fault on one of them; 60 s
without progress are a hang.
"""

import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

import torch

from benchmarks.__main__ import main_of
from benchmarks._fault_cases import CHANGING, IN_CHUNKS, MODELS, OPTIMIZERS, changing_optimizer
from benchmarks._fault_ranks import Job, Shared, run_ranks
from benchmarks._fault_runs import Case, Tally, added, quiet, run_case
from benchmarks._finished import FinishedCells
from benchmarks.harness import Options, Report

SHOWN_FAILURES = 20
# On which the tallies depend.
CODE = ("lightning_memkit", *(f"benchmarks/_fault_{name}.py" for name in ("cases", "ranks", "runs", "state")))
STEPS = {0: "cold", 1: "warm"}
RANKS = {
    "ddp": [
        ("transformer", "for_loop"),
        ("cnn", "foreach"),
        ("packed_lm", "fused"),
        ("contrastive", "foreach"),
    ],
    "fsdp2": [("sharded", "for_loop"), ("sharded", "foreach")],
}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """How many points of a case are run, None for all; how often ranks start anew."""

    budget: int | None = None
    naive: int | None = None
    ranks: int | None = None
    rank_starts: int = 20


def run(options: Options) -> Report:
    """All points, which takes hours, or with `--quick` a random sample of half of the cases'.

    A whole run that was stopped goes on from the cases that had ended, if the code is the same. `--only` takes a
    model, an optimizer, or the strategy of two ranks.
    """
    sample = Sample(budget=3, naive=2, ranks=4, rank_starts=3) if options.quick else Sample()
    cases, by_ranks = list(all_cases()), rank_cases(1 if options.quick else None)
    if options.only:
        cases = [case for case in cases if options.only in (case.model, case.optimizer)]
        by_ranks = [case for case in by_ranks if options.only == case[0]]
        if not cases and not by_ranks:
            names = sorted({case.model for case in all_cases()} | {*OPTIMIZERS, *RANKS})
            raise ValueError(f"--only {options.only}: no such case; there are {', '.join(names)}.")
    elif options.quick:  # every model, optimizer and step by operators; of the others every second cell
        cases = [case for place, case in enumerate(cases) if place % 12 not in (1, 5, 8, 10)]
    is_whole = not (options.quick or options.only)
    finished = FinishedCells(f"fault_sweep-seed-{options.seed}", CODE) if is_whole else None
    # Ranks first: what may hang is seen before the hours of the rest.
    shared = run_rank_cases(by_ranks, sample, options.seed, finished)
    tallies = dict(zip(cases, run_cases(cases, sample, options.seed, finished), strict=True))
    rows, ours, control, exact = [], [], [], []
    for case in cases:
        if case.kind == "operators" and not case.naive:
            row = [
                tallies[case],
                tallies.get(replace(case, kind="allocator")),
                tallies.get(replace(case, naive=True)),
            ]
            rows.append(_row(case, row))
        if case.dtype == torch.float64:
            exact.append(tallies[case])
        else:
            (control if case.naive else ours).append(tallies[case])
    whole, naive, notes = added(ours), added(control), []
    figures: dict[str, float | int | bool] = {
        "points": whole.points,
        "equal_fraction": whole.equal_fraction,
        "naive_points": naive.points,
        "naive_equal_fraction": naive.equal_fraction,
        "max_relative_diff_fp64": max((tally.largest_difference for tally in exact), default=0.0),
    }
    failures = [*whole.failures, *added(exact).failures]
    rows += [row for one in shared for row in one.rows()]
    for strategy in RANKS:
        tally = added(one.of(strategy) for one in shared)
        figures[f"{strategy}_points"] = tally.points
        figures[f"{strategy}_equal_fraction"] = tally.equal_fraction
        failures += [f"{strategy} {failure}" for failure in tally.failures]
    figures["hangs"] = sum(hangs for one in shared for hangs in one.hangs)
    notes += failures[:SHOWN_FAILURES]
    if len(failures) > SHOWN_FAILURES:
        notes.append(f"and {len(failures) - SHOWN_FAILURES} points more that are not equal")
    if finished is not None:
        if finished.found:
            cells = len(cases) + len(by_ranks)
            notes.append(f"{len(finished.found)} of {cells} cases are of a stopped run of the same code")
        finished.forget()
    notes.append("a cell is the points that end bitwise equal, of those run" + " (a sample)" * options.quick)
    return Report("fault_sweep", figures, rows, notes=tuple(notes), failed=bool(failures or figures["hangs"]))


def all_cases() -> Iterator[Case]:
    """Every cell of the table, the control's among them, and the cells in float64."""
    for model in MODELS:
        for optimizer in OPTIMIZERS:
            for step in STEPS:
                case = Case(model=model, optimizer=optimizer, step=step)
                yield from (case, replace(case, kind="allocator"), replace(case, naive=True))
    for model in (*CHANGING, *IN_CHUNKS):
        for step in STEPS:
            case = Case(model=model, optimizer=changing_optimizer(model), step=step)
            yield from (case, replace(case, kind="allocator"), replace(case, naive=True))
    for step in STEPS:
        yield Case(model="exact", optimizer="for_loop", step=step, dtype=torch.float64, steps_after=0)


def rank_cases(models: int | None) -> list[tuple[str, str, str, int]]:
    """Strategy, model, optimizer and step of what two ranks train; so many models a strategy."""
    return [
        (strategy, model, optimizer, step)
        for strategy, kinds in RANKS.items()
        for model, optimizer in kinds[:models]
        for step in STEPS
    ]


def run_rank_cases(
    cases: list[tuple[str, str, str, int]], sample: Sample, seed: int, finished: FinishedCells | None = None
) -> list[Shared]:
    """What came of each case of two ranks, one pair of ranks after the other."""
    known = {} if finished is None else finished.found
    results = []
    for case in cases:
        name = " ".join(map(str, case))
        job = Job(cases=[case], points=sample.ranks, seed=seed, most_starts=sample.rank_starts)
        if name in known:
            tallies, hangs = [Tally(**tally) for tally in known[name]["tallies"]], known[name]["hangs"]
            shared = Shared(job=job, tallies=tallies, hangs=hangs)
        else:
            shared = run_ranks(job)
            (tally,) = shared.tallies
            print(f"{name}: {tally.equal}/{tally.points}", file=sys.stderr, flush=True)
            if finished is not None:
                finished.add(name, {"tallies": [asdict(tally)], "hangs": shared.hangs})
        results.append(shared)
    return results


def run_cases(
    cases: list[Case], sample: Sample, seed: int, finished: FinishedCells | None = None
) -> list[Tally]:
    """The cases' tallies, from processes of a kind: one that has the device "fake" has it as its accelerator."""
    os.environ["OMP_NUM_THREADS"] = "1"
    known = {} if finished is None else finished.found
    tallies = {case: Tally(**known[str(case)]) for case in cases if str(case) in known}
    context, started = multiprocessing.get_context("spawn"), {}
    processes = max(1, (os.cpu_count() or 1) // 2) + 1  # one kind ends before the other
    with ExitStack() as stack:
        for kind in ("operators", "allocator"):
            pool = stack.enter_context(ProcessPoolExecutor(processes, context, initializer=quiet))
            for case in (case for case in cases if case.kind == kind and case not in tallies):
                started[case] = pool.submit(
                    run_case, case, sample.naive if case.naive else sample.budget, seed
                )
        for running in as_completed(started.values()):
            case = next(case for case, future in started.items() if future is running)
            tally, kind = running.result(), "naive" if case.naive else case.kind
            line = f"{case.model} {case.optimizer} {STEPS[case.step]} {kind}: {tally.equal}/{tally.points}"
            print(line, file=sys.stderr, flush=True)
            tallies[case] = tally
            if finished is not None:
                finished.add(str(case), asdict(tally))
    return [tallies[case] for case in cases]


def _row(case: Case, tallies: list[Tally | None]) -> dict[str, object]:
    precision = ", float64" if case.dtype == torch.float64 else ""
    row: dict[str, object] = {
        "model": case.model + precision,
        "optimizer": case.optimizer,
        "step": STEPS[case.step],
    }
    for name, tally in zip(("operators", "allocator", "naive"), tallies, strict=True):
        row[name] = "" if tally is None else f"{tally.equal}/{tally.points}"
    return row


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))

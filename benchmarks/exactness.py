"""Training steps under MemoryBudget, against the same steps unsplit: equal, whole, chunked, refused or different.

Half of the steps are written by hand, half are drawn by a generator, others for each `--seed`. Each trains in twelve
seeds, each in float64, fp32, bf16-mixed, pure bf16 or with adapters on a bf16 base, with micro-batches of 1, of 3 and
"auto". Truth "parts": the loss is a weighted combination of its micro-batches' losses; "terms": each of its terms is,
with weights of its own; "rows": rows act on each other; "state": the step changes more than gradients. A refusal of a
step of truth "parts" counts as wrong. What differs is named with the command that repeats it; a documented
inexactness that a warning named counts as "warned"; "chunked" is equal, by whole batches whose modules ran in chunks
of the size. A quarter of the seeds have batches of half as many rows. Then steps of truth "parts" on two ranks that
share the rows of a batch, in float64; class weights with 1 to 10 % of positives, 48 runs in float64; and the time that
observing the loss adds to a step, in pairs.
"""

import gc
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module, util
from multiprocessing import get_context
from typing import Any

from benchmarks.__main__ import main_of
from benchmarks._exactness_by_hand import train_by_hand
from benchmarks._exactness_classes import RUNS, class_weight_runs
from benchmarks._exactness_generator import cases_of
from benchmarks._exactness_judge import (
    DIFFERENT,
    EQUAL,
    OUTCOMES,
    REFUSED,
    SPLIT,
    WHOLE,
    Noise,
    Verdict,
    judge,
)
from benchmarks._exactness_models import PARTS, STATE, Case
from benchmarks._exactness_ranks import Found, figures_on_ranks, judged_on_ranks
from benchmarks._exactness_runs import MORE_SCALES, Trace, jittered, rescaled, train, unsplit
from benchmarks.harness import Options, Ratio, Report, one_thread, paired_ratio
from lightning_memkit import MemoryBudget
from lightning_memkit.micro_batching.history import in_force

SIZES: tuple[Any, ...] = (1, 3, "auto")
# The dtype of each of a step's twelve seeds
DTYPES_OF_SEEDS = (
    "float64", "float32", "bf16-mixed", "pure-bf16", "lora", "float64",
    "float32", "bf16-mixed", "float64", "lora", "pure-bf16", "float32",
)  # fmt: skip
HALVED = (3, 6, 9)  # the seeds whose batches have half as many rows
QUICK_STEPS, QUICK_SEEDS = 24, 5
_OBSERVATION = "lightning_memkit.micro_batching.graph.observation"
_SHOWN = 400  # characters of an error


@dataclass(frozen=True)
class Cell:
    """One step, seed, dtype and size, and what became of it."""

    case: Case
    seed: int
    dtype: str
    size: int | str
    verdict: Verdict


def run(options: Options) -> Report:
    """About an hour on one core, which every core shares; `--quick` takes a sample of steps and seeds."""
    with one_thread(), _no_tuning_cache(), short_collections():
        cells = list(judged(options))
        on_ranks = judged_on_ranks(options.seed, list(dict.fromkeys(cell.case.name for cell in cells)))
        figures = figures_of(cells) | figures_on_ranks(on_ranks)
        if not options.only:
            runs = class_weight_runs(options.seed, RUNS // 4 if options.quick else RUNS)
            figures["class_weights_equal"] = sum(one.equal for one in runs)
            figures["class_weights_split"] = sum(one.split for one in runs)
            figures["class_weights_runs"] = len(runs)
            added = _observation_pct(options)
            if added is not None:
                figures["observation_pct"] = 100 * (added.median - 1)
                figures["observation_high_pct"] = 100 * (added.high - 1)
    notes = [told(cell, options.seed) for cell in cells if cell.verdict.outcome == DIFFERENT]
    notes += [told(cell, options.seed) for cell in cells if _is_wrongly_refused(cell)]
    notes += [_told_on_ranks(one, options.seed) for one in on_ranks if one.why]
    failed = bool(figures["different"] or figures["ranks_different"])
    return Report("exactness", figures, rows_of_table(cells), notes=tuple(notes), failed=failed)


def judged(options: Options) -> Iterator[Cell]:
    """Every cell, in order; a process a core judges them."""
    cases = cases_of(options.seed)  # forks have them, too: they can't be pickled
    places, seeds = range(len(cases)), range(len(DTYPES_OF_SEEDS))
    if options.only:
        places = [place for place, case in enumerate(cases) if case.name == options.only]
        if not places:
            raise ValueError(f"--only {options.only}: no such step; drawn steps are named by --seed.")
    elif options.quick:
        places, seeds = places[:: -(-len(cases) // QUICK_STEPS)], range(QUICK_SEEDS)
    # Another order of dtypes a step, where only some seeds are run.
    turns = range(len(places)) if options.quick else [0] * len(places)
    wanted = [
        (options, place, index, turn) for place, turn in zip(places, turns, strict=True) for index in seeds
    ]
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(wanted)), get_context("fork")) as pool:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)  # torch's idle threads
            running = [pool.submit(_judge_one, one) for one in wanted]
        for count, (future, (_, place, *_)) in enumerate(zip(running, wanted, strict=True), 1):
            yield from (Cell(cases[place], *found) for found in future.result())
            if count % len(seeds) == 0:
                print(f"{count} of {len(wanted)}: {cases[place].name}", file=sys.stderr, flush=True)


def _judge_one(wanted: tuple[Options, int, int, int]) -> list[tuple[int, str, int | str, Verdict]]:
    """The cells of one step in one of its seeds, whose dtype is that of the seed some turns later."""
    options, place, index, turn = wanted
    case = cases_of(options.seed)[place]
    dtype = DTYPES_OF_SEEDS[(index + turn) % len(DTYPES_OF_SEEDS)]
    dtype = dtype if dtype in case.dtypes else case.dtypes[index % len(case.dtypes)]
    sizes = [size for size in SIZES if options.size in ("", str(size))]
    if index in HALVED:
        case = replace(case, batches=tuple(-(-rows // 2) for rows in case.batches))
    cells = cells_of(case, 100 * options.seed + index, dtype, sizes)
    return [(cell.seed, cell.dtype, cell.size, cell.verdict) for cell in cells]


def cells_of(case: Case, seed: int, dtype: str, sizes: Any = SIZES) -> Iterator[Cell]:
    """The unsplit runs, once, and a run of each size against them."""
    plain, others = unsplit(case, seed, dtype)
    for size in sizes:
        budget = MemoryBudget("1GiB", micro_batch_size=size)
        ours = train(case, seed, dtype, budget)
        ours.in_chunks = any(change.chunk_rows is not None for change in budget.history)
        verdict = judge(case, dtype, ours, plain, others)
        if verdict.outcome == DIFFERENT and ours.error is None:
            # A hinge or an optimizer may make much of a rounding: ask more runs that only round otherwise.
            in_chunks = ours.in_chunks and not ours.split_at
            others += [
                *rescaled(case, seed, dtype, MORE_SCALES),
                *jittered(case, seed, dtype, in_chunks=in_chunks),
            ]
            taken = (
                [size] if isinstance(size, int) else {change.micro_batch_size for change in budget.history}
            )
            by_hand = _rounded_by_parts(
                case, seed, dtype, [*sorted(taken), *_as_taken(budget)], plain, others
            )
            verdict = judge(case, dtype, ours, plain, others, by_hand)
            if verdict.where == SPLIT and _parts_add_up(case, seed, dtype, size, ours):
                verdict = replace(verdict, outcome=EQUAL)
        yield Cell(case, seed, dtype, size, verdict)


def _parts_add_up(case: Case, seed: int, dtype: str, size: Any, ours: Trace) -> bool:
    """Whether parts of the batches that were split do add up, in float64, though rows of others act on each other.

    With rounded weights or adapters a router may choose otherwise than in float32: the cell's own net is asked, too.
    """
    for kind in dict.fromkeys(("float32", dtype)):
        if any(train_by_hand(case, seed, kind, rows, ours.split_at) is not None for rows in (4, 2, 1)):
            return True
    wide = "float64"  # where each term has a weight of its own
    if wide not in case.dtypes:
        return False
    run = train(case, seed, wide, MemoryBudget("1GiB", micro_batch_size=size))
    verdict = judge(case, wide, run, *unsplit(case, seed, wide))
    return verdict.outcome == EQUAL and set(ours.split_at) <= set(run.split_at)


def _as_taken(budget: MemoryBudget) -> list[Callable[[int], int]]:
    """The size of each batch where it changed on the way: one rounding earlier, a sign later may be another."""
    history = list(budget.history)
    return [lambda number: in_force(history, number, number).micro_batch_size] if len(history) > 1 else []


def _rounded_by_parts(
    case: Case,
    seed: int,
    dtype: str,
    sizes: Iterable[int | Callable[[int], int]],
    plain: Trace,
    others: Sequence[Trace],
) -> list[Trace]:
    """The case with its parts of these sizes added up by hand; without those that change its state otherwise, too."""
    if case.truth not in (PARTS, STATE):
        return []
    noise = Noise(dtype, case, plain, others)
    found = (
        train_by_hand(case, seed, dtype, size, relative=relative)
        for size in sizes
        for relative in (False, True)
    )
    return [
        by_hand
        for by_hand in found
        if by_hand is not None
        and all(one.ratio <= 1 for one in noise.values("state", by_hand.state, plain.state, 0))
    ]


def figures_of(cells: list[Cell]) -> dict[str, float | int | bool]:
    """Counts and shares."""
    decomposable = [cell for cell in cells if cell.case.decomposable]
    outcomes = Counter(cell.verdict.outcome for cell in cells)
    return {
        "steps": len({cell.case.name for cell in cells}),
        "cells": len(cells),
        **{outcome: outcomes[outcome] for outcome in OUTCOMES},
        "whole_fraction": outcomes[WHOLE] / max(1, len(cells)),
        "wrongly_refused_fraction": sum(map(_is_wrongly_refused, cells)) / max(1, len(decomposable)),
        "split_fraction": sum(cell.verdict.split for cell in decomposable) / max(1, len(decomposable)),
    }


def rows_of_table(cells: list[Cell]) -> list[dict[str, object]]:
    """A row a truth and dtype, or a step where one alone was run: how many of its cells became what."""
    one_step = len({cell.case.name for cell in cells}) == 1
    grouped: dict[tuple[str, str, str], Counter[str]] = {}
    for cell in cells:
        key = (cell.case.name if one_step else "all", cell.case.truth, cell.dtype)
        grouped.setdefault(key, Counter())[cell.verdict.outcome] += 1
    return [
        {"steps": name, "truth": truth, "dtype": dtype, **{outcome: counts[outcome] for outcome in OUTCOMES}}
        for (name, truth, dtype), counts in sorted(grouped.items())
    ]


def told(cell: Cell, seed: int) -> str:
    """A cell in words, with the command that repeats it."""
    verdict = cell.verdict
    at_step = "" if verdict.at_step < 0 else f" from batch {verdict.at_step}"
    return (
        f"{verdict.outcome.upper()} {cell.case.name} ({cell.case.truth}), seed {cell.seed}, {cell.dtype}, "
        f"micro-batches of {cell.size}: {verdict.where} {verdict.difference[:_SHOWN]}{at_step}. "
        f"python -m benchmarks.exactness --seed {seed} --only {cell.case.name} --size {cell.size}"
    )


def _told_on_ranks(found: Found, seed: int) -> str:
    return (
        f"{found.outcome.upper()} on two ranks: {found.name}, micro-batches of {found.size}: {found.why}. "
        f"python -m benchmarks.exactness --seed {seed} --only {found.name}"
    )


def _is_wrongly_refused(cell: Cell) -> bool:
    return cell.verdict.outcome == REFUSED and cell.case.decomposable


def _observation_pct(options: Options) -> Ratio | None:
    """A split step with the loss observed over one without; None where observation can't be paused."""
    try:
        found = util.find_spec(_OBSERVATION)
    except ModuleNotFoundError:
        found = None
    paused = getattr(import_module(_OBSERVATION), "paused", None) if found else None
    if paused is None:
        return None
    from benchmarks.micro_batching import SteppedTrainer

    stepped = SteppedTrainer(8, MemoryBudget("8GiB", micro_batch_size=2))

    def unobserved() -> None:
        with paused():
            stepped.step()

    try:
        return paired_ratio(stepped.step, unobserved, pairs=100 if options.quick else 200, seed=options.seed)
    finally:
        stepped.stop()


@contextmanager
def short_collections() -> Iterator[None]:
    """Each run collects garbage before it measures: what was imported is not looked through each time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _no_tuning_cache() -> Iterator[None]:
    """One run's sizes must not decide another's."""
    before = os.environ.get("MEMKIT_TUNING_CACHE")
    os.environ["MEMKIT_TUNING_CACHE"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["MEMKIT_TUNING_CACHE"]
        else:
            os.environ["MEMKIT_TUNING_CACHE"] = before


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))

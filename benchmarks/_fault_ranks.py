"""Two gloo ranks with the fault on one of them: the script that each rank runs, and who starts and watches them."""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from benchmarks._fault_runs import (
    Case,
    End,
    Proofs,
    References,
    Tally,
    added,
    chosen_points,
    quiet,
    reasons,
    train,
)
from benchmarks._watched_ranks import HANG_SECONDS, watched
from lightning_memkit.testing import Faults, Outcome, sweep
from tests.plugins.ranks import leave


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a pair of ranks is to do.

    Attributes:
        cases: strategy (`ddp` or `fsdp2`), model, optimizer and step of each.
        points: how many of a case's points are run; None for all.
        seed: what a sample of points is drawn from.
        most_starts: how often ranks are started anew; each costs seconds. Points never come to are not equal.
    """

    cases: list[tuple[str, str, str, int]]
    points: int | None
    seed: int
    most_starts: int


@dataclass(kw_only=True)
class Shared:
    """What came of a job: a tally a case, and how often the ranks hung."""

    job: Job
    tallies: list[Tally]
    hangs: list[int]

    def rows(self) -> list[dict[str, object]]:
        """The table's rows."""
        return [
            {
                "model": f"{model}, 2 ranks {strategy}",
                "optimizer": optimizer,
                "step": "warm" if step else "cold",
                "operators": f"{tally.equal}/{tally.points}",
                "hangs": hangs,
            }
            for (strategy, model, optimizer, step), tally, hangs in zip(
                self.job.cases, self.tallies, self.hangs, strict=True
            )
        ]

    def of(self, strategy: str) -> Tally:
        """The sum of a strategy's tallies."""
        pairs = zip(self.job.cases, self.tallies, strict=True)
        return added(tally for case, tally in pairs if case[0] == strategy)


def run_ranks(job: Job) -> Shared:
    """Sweep the points of two ranks; starts them anew after a hang or an end that was not planned."""
    records: list[dict[str, Any]] = []
    hangs, starts = [0] * len(job.cases), 0
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        results.touch()
        while starts < job.most_starts:
            starts += 1
            case, at = _next(records, job)
            if case == len(job.cases):
                break
            given = {"job": asdict(job), "case": case, "at": at, "path": str(results)}
            hung = watched("benchmarks._fault_ranks", json.dumps(given), results)
            before, records = len(records), _read(results)
            if hung or len(records) == before:
                case, at = _next(records, job)
                if case == len(job.cases):
                    break
                hangs[case] += hung
                why = f"no progress in {HANG_SECONDS} s" if hung else "the ranks ended without a word"
                total = next((record["total"] for record in records if record["case"] == case), 1)
                _append(results, {"case": case, "at": at, "total": total, "point": -1, "why": why})
                records = _read(results)
    return Shared(job=job, tallies=[_tally(records, case) for case in range(len(job.cases))], hangs=hangs)


def _next(records: list[dict[str, Any]], job: Job) -> tuple[int, int]:
    """The case and the place of the next point to run."""
    if not records:
        return 0, 0
    last = records[-1]
    if last["at"] + 1 < last["total"]:
        return last["case"], last["at"] + 1
    return last["case"] + 1, 0


def _append(results: Path, record: dict[str, Any]) -> None:
    with results.open("a") as file:
        file.write(json.dumps(record) + "\n")


def _read(results: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in results.read_text().splitlines()]
    # Where both ranks failed, both have written.
    return list({(record["case"], record["at"]): record for record in records}.values())


def _tally(records: list[dict[str, Any]], case: int) -> Tally:
    tally = Tally()
    mine = [record for record in records if record["case"] == case]
    for record in mine:
        tally.points, tally.total_points = tally.points + 1, record["total"]
        if record["why"]:
            tally.fail(record["point"], record.get("operator", ""), record["why"])
        else:
            tally.equal += 1
    missing = max(1, tally.total_points) - tally.points
    if missing:
        tally.points += missing
        tally.fail(-1, "", f"{missing} points were never come to")
    return tally


# Within a rank


def main(job: Job, case: int, at: int, path: Path) -> None:
    """Sweep from a place in a case on; rank 0 writes a line a point."""
    quiet()
    for index in range(case, len(job.cases)):
        _sweep_case(job, index, at if index == case else 0, path)
    leave()


def _sweep_case(job: Job, index: int, first: int, path: Path) -> None:
    name, model, optimizer, step = job.cases[index]
    rank, failing = int(os.environ["RANK"]), 1 - step
    case = Case(model=model, optimizer=optimizer, step=step)
    chosen: Sequence[int] = ()

    def agreed(count: int) -> Sequence[int]:
        nonlocal chosen
        chosen = chosen_points(_gathered(count)[failing], job.points, job.seed)
        return chosen[first:]

    def strategy() -> Any:
        return DDPStrategy() if name == "ddp" else ModelParallelStrategy(2, 1)

    # Each rank's; comparisons are collective, so that both ranks find one, or neither does.
    proofs = Proofs()
    references = References(case, None, rank=rank, strategy=strategy, proofs=proofs)
    outcomes = sweep(
        lambda faults: _trained(case, faults, rank=rank, strategy=strategy, proofs=proofs),
        armed=False, ranks=[failing], points=agreed,
    )  # fmt: skip
    for place, outcome in enumerate(outcomes, start=first):
        record: dict[str, Any] = {"case": index, "at": place, "total": len(chosen), "point": outcome.point}
        if outcome.error is not None:  # the other rank waits for this one, maybe for ever
            _append(path, {**record, "why": reasons(outcome, references)})
            os._exit(1)
        record["operator"], record["why"] = _judged(outcome, references, failing)
        if rank == 0:
            _append(path, record)


def _trained(case: Case, faults: Faults | None, **where: Any) -> End:
    """A training, after which its device mesh's groups are gone: each keeps threads, and thousands follow."""
    try:
        return train(case, faults, **where)
    finally:
        for group in list(torch.distributed.distributed_c10d._world.pg_map):
            if group is not torch.distributed.group.WORLD:
                torch.distributed.destroy_process_group(group)


def _judged(outcome: Outcome[Any], references: References, failing: int) -> tuple[str, str]:
    """The operator that failed, and why the ranks' outcomes are not what they should be."""
    assert outcome.result is not None
    partitions = _gathered(outcome.result.partition)
    fault = _gathered(outcome.fault)[failing]
    if partitions[0] != partitions[1]:
        return "", f"the ranks took different partitions: {partitions}"
    if fault is None:
        return "", "the fault was not reached"
    whys = _gathered(reasons(outcome, references, peer=True))
    return fault.operator, "; ".join(f"rank {rank}: {why}" for rank, why in enumerate(whys) if why)


def _gathered(value: Any) -> list[Any]:
    """Every rank's value."""
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(Job(**given["job"]), given["case"], given["at"], Path(given["path"]))

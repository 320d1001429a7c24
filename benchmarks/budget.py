"""Speed of the size that MemoryBudget chooses, against the best of all sizes and Lightning's BatchSizeFinder.

Models train under a budget. MemoryBudget measures the largest part that fits and times smaller ones on its first
training steps. Then all sizes up to the largest are timed in turns, and the chosen one and the best others once
more as pairs, in fresh processes: where a process happens to lay its tensors moves a step's time by several percent,
for as long as it lives. At last the chosen size trains with every byte counted against the budget. The finder gets a
datamodule, its stock settings and the same budget: its steps are metered, and a byte too many raises the error that
CUDA would. Its answer then trains the same samples, accumulated to the same effective batch.
"""

import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.__main__ import main_of
from benchmarks._budget_models import Case, Model, cases
from benchmarks._gpu_rows import GpuRow
from benchmarks.harness import (
    Options,
    Ratio,
    Report,
    keep_freed_memory,
    paired_ratio,
    self_ratio_is_void,
)
from benchmarks.micro_batching import SteppedTrainer, _Batches, quiet_trainer
from lightning_memkit import MemoryBudget
from lightning_memkit.memory.meter import ByteMeter
from lightning_memkit.memory.units import format_bytes

STEPS, HELD_STEPS, ROUNDS, PAIRS, HEADROOM = 48, 20, 10, 100, 0.05
PROCESSES, RIVALS, NEAR = 5, 2, 1.05  # near: slower than the chosen size by no more, in the grid
SPREAD = 1.2  # slowest over fastest: from here on the size matters


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What MemoryBudget made of a budget, and whether it held."""

    size: int
    largest: int
    probe_steps: int
    tuning_steps: int
    oom: int


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the finder made of the same budget, and whether it held."""

    size: int
    steps: int
    search_ooms: int
    oom: int


def run(options: Options) -> Report:
    """Five models, or three of them in a quick run."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keep_freed_memory()
    chosen_cases = cases()[2:] if options.quick else cases()
    with _without_cache():
        measured = [_measure(case, options) for case in chosen_cases]
    rows = [row for row, _ in measured]
    itself = _itself(chosen_cases[-1], options)
    rows.append({"model": f"{chosen_cases[-1].name} : itself", **_interval(itself)})
    models = rows[:-1]
    figures: dict[str, float | int | bool] = {
        "throughput_fraction": min(float(str(row["fraction"])) for row in models),
        "throughput_fraction_low": min(float(str(row["low_95"])) for row in models),
        "models": len(models),
        "models_where_size_matters": sum(spread >= SPREAD for _, spread in measured),
        "probe_steps_max": max(int(str(row["probe_steps"])) for row in models),
        "oom": sum(int(str(row["oom"])) for row in models),
        "finder_oom": sum(int(str(row["finder_oom"])) for row in models),
        "finder_steps_max": max(int(str(row["finder_steps"])) for row in models),
        "finder_fraction": min(float(str(row["finder_fraction"])) for row in models),
        "self_ratio": itself.median,
    }
    notes = (
        f"fraction: throughput of the chosen size over that of the grid's best {RIVALS} others, timed as pairs in "
        "fresh processes, the median of them; 1 where no other is faster. Its range leaves out the outermost two.",
        "finder_fraction: the same for the finder's answer by the grid's times; its steps are thrown away.",
        "probe_steps: forward and backward passes of the sizing, thrown away; tuning_steps train.",
    )
    return Report("budget", figures, rows, void=self_ratio_is_void(itself), notes=notes)


def gpu_rows(options: Options) -> list[GpuRow]:
    """The chosen size against the exhaustive grid on a GPU, a model a row."""
    from benchmarks._gpu_budget import rows_of_budgets

    return rows_of_budgets(options)


def _measure(case: Case, options: Options) -> tuple[dict[str, object], float]:
    """The row of one model, and how far the grid's sizes are apart."""
    budget_bytes = _budget_for(case)
    chosen, found = _choose(case, budget_bytes), _find(case, budget_bytes)
    grid = [size for size in _all_sizes(case.rows) if size <= chosen.largest]
    stepped = {size: SizedTrainer(case, size) for size in sorted({*grid, chosen.size, found.size})}
    try:
        seconds = _time_in_turns(stepped, 4 if options.quick else ROUNDS)
    finally:
        for trainer in stepped.values():
            trainer.stop()
    best, ratio = _best_of(case, chosen.size, {size: seconds[size] for size in grid}, options)
    fastest = min(seconds[size] for size in grid)
    spread = max(seconds[size] for size in grid) / fastest
    row: dict[str, object] = {
        "model": case.name,
        "budget": format_bytes(budget_bytes),
        "largest": chosen.largest,
        "chosen": chosen.size,
        "best": best,
        "best_ms": round(1000 * seconds[best], 1),
        "spread": round(spread, 2),
        **_interval(ratio),
        "probe_steps": chosen.probe_steps,
        "tuning_steps": chosen.tuning_steps,
        "oom": chosen.oom,
        "finder": found.size,
        "finder_fraction": round(fastest / seconds[found.size], 3),
        "finder_steps": found.steps,
        "finder_search_ooms": found.search_ooms,
        "finder_oom": found.oom,
    }
    return row, spread


def _best_of(case: Case, ours: int, grid: dict[int, float], options: Options) -> tuple[int, Ratio]:
    """The best size, and the time of ours over its: ours is paired with the best others of the grid."""
    others = sorted((size for size in grid if size != ours), key=grid.__getitem__)
    rivals = [size for size in others if grid[size] <= NEAR * grid[ours]][: 1 if options.quick else RIVALS]
    ratios = {rival: _in_processes(case, ours, rival, options) for rival in rivals}
    best = max(ratios, key=lambda rival: ratios[rival].median, default=ours)
    if best == ours or ratios[best].median <= 1:
        return ours, Ratio(1.0, 1.0, 1.0, sum(ratio.pairs for ratio in ratios.values()))
    return best, ratios[best]


def _in_processes(case: Case, ours: int, peer: int, options: Options) -> Ratio:
    """The median over processes of each one's median of pairs; the interval is that of all but the outermost."""
    count = 3 if options.quick else PROCESSES
    context = multiprocessing.get_context("spawn")
    medians = []
    for index in range(count):
        with context.Pool(1) as pool:
            medians.append(pool.apply(_pairs_of, (case.name, ours, peer, options.seed + index)))
    medians.sort()
    trimmed = medians[1:-1]
    return Ratio(median(medians), trimmed[0], trimmed[-1], count * PAIRS)


def _pairs_of(name: str, ours: int, peer: int, seed: int) -> float:
    """Time of a step of `ours` over one of `peer` samples, of two trainers in a process of their own."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keep_freed_memory()
    case = next(case for case in cases() if case.name == name)
    stepped: dict[int, SizedTrainer] = {}
    for size in (ours, peer) if seed % 2 else (peer, ours):  # who comes first has the better of the heap
        stepped[size] = SizedTrainer(case, size)
    try:
        return paired_ratio(stepped[ours].step, stepped[peer].step, pairs=PAIRS, seed=seed).median
    finally:
        for trainer in stepped.values():
            trainer.stop()


def _interval(ratio: Ratio) -> dict[str, object]:
    """A ratio of times, turned over to one of throughputs."""
    return {
        "fraction": round(1 / ratio.median, 4),
        "low_95": round(1 / ratio.high, 4),
        "high_95": round(1 / ratio.low, 4),
        "pairs": ratio.pairs,
    }


def _all_sizes(rows: int) -> list[int]:
    """One size for each number of parts."""
    return sorted({-(-rows // parts) for parts in range(1, rows + 1)})


def _budget_for(case: Case) -> int:
    """What a part of `case.fits` samples needs, with the headroom."""
    budget = MemoryBudget("8GiB", micro_batch_size=case.fits)
    _fit(case, budget, 1)
    return int(budget.peak_bytes / (1 - HEADROOM) * 1.001)


def _fit(case: Case, budget: MemoryBudget, steps: int) -> None:
    torch.manual_seed(0)
    # One data set for all: what is verified is the largest of its samples.
    quiet_trainer(budget, max_steps=steps).fit(case.module(), case.loader(STEPS))


def _choose(case: Case, budget_bytes: int) -> Chosen:
    budget = MemoryBudget(budget_bytes, headroom=HEADROOM)
    _fit(case, budget, STEPS)
    assert budget.sizing is not None
    size = int(budget.state_dict()["micro_batch_size"])
    # Every byte of a training with the answer counts.
    held, oom = MemoryBudget(budget_bytes, micro_batch_size=size, enforce="always"), 0
    try:
        _fit(case, held, HELD_STEPS)
    except torch.OutOfMemoryError:
        oom = 1
    return Chosen(
        size=size,
        largest=budget.sizing.micro_batch_size,
        probe_steps=len(budget.sizing.trials),
        tuning_steps=budget.history[-1][0],
        oom=oom,
    )


def _find(case: Case, budget_bytes: int) -> Found:
    data, search = _Data(case), _metered(case, budget_bytes)
    with tempfile.TemporaryDirectory() as folder:
        tuner = Tuner(quiet_trainer(max_steps=STEPS, default_root_dir=folder))
        answer = tuner.scale_batch_size(search, datamodule=data)
    size, oom = min(answer or data.batch_size, case.rows), 0
    data.batch_size, training = size, _metered(case, budget_bytes)
    accumulated = max(1, round(case.rows / size))
    try:
        quiet_trainer(max_steps=HELD_STEPS, accumulate_grad_batches=accumulated).fit(training, data)
    except torch.OutOfMemoryError:
        oom = 1
    return Found(size=size, steps=search.steps, search_ooms=search.ooms, oom=oom)


class _Data(LightningDataModule):
    """The datamodule with a `batch_size` that the finder asks for."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.batch_size, self._case = 2, case

    def train_dataloader(self) -> DataLoader:
        return self._case.loader(STEPS, batch_size=self.batch_size)


class _Metered(Model):
    """A model whose every step is counted against a budget."""

    budget_bytes, steps, ooms = 0, 0, 0
    _batch: Any = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._batch = batch

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, *closure: Any) -> None:
        self.steps += 1
        with self._counted(optimizer):
            super().optimizer_step(epoch, batch_idx, optimizer, *closure)

    @contextmanager
    def _counted(self, optimizer: Any) -> Iterator[None]:
        meter = _CudaMeter(budget_bytes=self.budget_bytes)
        meter.track([*self.parameters(), *self.buffers(), *self._batch.values()])
        meter.track(p.grad for p in self.parameters() if p.grad is not None)
        meter.track(
            _tensors(value for state in optimizer.optimizer.state.values() for value in state.values())
        )
        try:
            with meter:
                yield
        except torch.OutOfMemoryError:
            self.ooms += 1
            raise


class _CudaMeter(ByteMeter):
    """Fails in the words by which Lightning knows an OOM."""

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        try:
            return super()._count(func, args, kwargs)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(f"CUDA out of memory. {error}") from None


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor))


def _metered(case: Case, budget_bytes: int) -> _Metered:
    torch.manual_seed(0)
    module = _Metered(case.module().net)
    module.budget_bytes = budget_bytes
    return module


class SizedTrainer(SteppedTrainer):
    """A Trainer that takes steps with parts of a given size when it is told to."""

    def __init__(self, case: Case, size: int) -> None:
        self._case, self._taken = case, 0
        self._data = list(case.loader(8))
        super().__init__(case.rows, MemoryBudget("8GiB", micro_batch_size=size))

    def _fit(self, callbacks: tuple[Any, ...], accumulate: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        trainer = quiet_trainer(*callbacks, max_steps=1_000_000, max_epochs=1)
        trainer.fit(self._case.module(), _Batches(self._batch, self._wait))  # pyright: ignore[reportArgumentType]

    def _batch(self) -> dict[str, Tensor]:
        self._taken += 1
        return self._data[self._taken % len(self._data)]


def _time_in_turns(stepped: dict[int, SizedTrainer], rounds: int) -> dict[int, float]:
    """The median seconds of a step of each size."""
    seconds: dict[int, list[float]] = {size: [] for size in stepped}
    for turn in range(-1, rounds):
        for size, trainer in stepped.items():
            start = time.perf_counter()
            trainer.step()
            if turn >= 0:  # the first step measures and warms up
                seconds[size].append(time.perf_counter() - start)
    return {size: median(times) for size, times in seconds.items()}


def _itself(case: Case, options: Options) -> Ratio:
    trainer = SizedTrainer(case, case.fits)
    try:
        return paired_ratio(trainer.step, trainer.step, pairs=PAIRS, seed=options.seed)
    finally:
        trainer.stop()


@contextmanager
def _without_cache() -> Iterator[None]:
    """Nothing that an earlier run has found is used or replaced."""
    name = "MEMKIT_TUNING_CACHE"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))

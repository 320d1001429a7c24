"""Loading beside training: how long a loop waits for data before and after tuning, and how fast packs are built.

A step waits as a processor waits for its accelerator; loading waits too (a disk, a network), or keeps a core busy.
Three ratios of loading and step, by either kind of loading, and the packed standard library are trained twice: for 40
batches with the loader as it is, without workers, and for 160 with `LoaderTuner`. `stall_before_pct` and
`stall_after_pct` are what Lightning's own profiler says of the second half: waiting for a batch, over that and the
steps, without the first batch of an epoch, for which workers may have to start. Both are the worst of those cases in
which as many workers as there can be would load in at most 0.7 of a step each, however many the tuner takes; the
others need more cores than there are.

`packs_vs_hf` is how many times as many packs of 8192 tokens one core builds in a second as with transformers'
`DataCollatorWithFlattening` from lists of token ids; its lower end is `packs_vs_hf_low`. Both give token ids, labels,
positions and the documents' bounds.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.profilers import SimpleProfiler
from torch.utils.data import DataLoader, Dataset

from benchmarks.__main__ import main_of
from benchmarks.harness import Options, Ratio, Report, one_thread, paired_ratio, self_ratio_is_void
from lightning_memkit.data.batching.packed_rows import PackedRows
from lightning_memkit.data.loading.loader import PackedLoader
from lightning_memkit.data.loading.loader_tuning import MOST_WORKERS
from lightning_memkit.data.packing.pack import pack
from lightning_memkit.data.sources.corpus import Corpus
from lightning_memkit.data.sources.shares import DocumentOptions
from lightning_memkit.memory.processors import usable_processors
from lightning_memkit.plugins.data.loader_tuner import LoaderTuner
from lightning_memkit.plugins.data.packed_data import PackedDataModule

STEP_SECONDS = 0.06
SHORT_STEP_SECONDS = 0.02
RATIOS = (0.3, 1.2, 2.4)  # of loading and step
BUSY = 0.7  # what a worker may load at the most, in steps
BATCHES = 80  # an epoch; the tuner looks after 12 and 48
CONTEXT = 8192
LIBRARY_ROWS = 64  # a batch
PACKS = 16  # in a timed step


class Loads(Dataset[torch.Tensor]):
    """Batches that take a while: asleep, or by keeping a core busy."""

    def __init__(self, seconds: float, batches: int, *, is_busy: bool) -> None:
        self.seconds, self.batches, self.is_busy = seconds, batches, is_busy

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.is_busy:
            end = time.thread_time() + self.seconds
            while time.thread_time() < end:
                pass
        else:
            time.sleep(self.seconds)
        return torch.full((16, 1024), index)

    def __len__(self) -> int:
        return self.batches


class Durations(SimpleProfiler):
    """Lightning's profiler, without its table."""

    def describe(self) -> None:
        """Prints nothing."""


class Waits(LightningModule):
    """A step in which the processor waits for an accelerator."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """As long as the accelerator takes."""
        time.sleep(self.seconds)
        return self.weight.square()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One weight."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained; `most_workers` is how many can load at once."""

    name: str
    data: Callable[[], DataLoader[Any] | LightningDataModule]
    load_seconds: float
    step_seconds: float
    most_workers: int

    @property
    def is_promised(self) -> bool:
        """Whether workers can keep the loop fed here."""
        return self.load_seconds / self.most_workers <= BUSY * self.step_seconds


@dataclass(frozen=True)
class Result:
    """What one case gave."""

    before_pct: float
    after_pct: float
    is_promised: bool
    line: dict[str, object]


def run(options: Options) -> Report:
    """Trains every case with and without the tuner, then builds packs."""
    step = STEP_SECONDS if options.quick else 2 * STEP_SECONDS
    with warnings.catch_warnings(), one_thread():
        warnings.simplefilter("ignore")
        results = [tuned(case) for case in (*synthetic(step), *library(options, step))]
        ours, itself = packs(options.seed)
    promised = [result for result in results if result.is_promised]
    return Report(
        name="loader",
        figures={
            "stall_before_pct": max(result.before_pct for result in promised),
            "stall_after_pct": max(result.after_pct for result in promised),
            "cases": len(results),
            "promised_cases": len(promised),
            "packs_vs_hf": 1 / ours.median,
            "packs_vs_hf_low": 1 / ours.high,
            "packs_per_second": PACKS * 1000 / ours.ours_ms,
        },
        rows=[
            *(result.line for result in results),
            ours.row(f"{PACKS} packs of {CONTEXT}: ours and transformers'"),
            itself.row(f"{PACKS} packs of {CONTEXT}: against itself"),
        ],
        void=self_ratio_is_void(itself),
        notes=(
            f"{usable_processors():g} processors. Where loading keeps a core busy, no more workers help than cores.",
            "A step is a sleep: what trains needs no core meanwhile.",
        ),
    )


def synthetic(step: float) -> list[Case]:
    """Both kinds of loading at every ratio."""

    def data(load: float, is_busy: bool) -> Callable[[], DataLoader[Any]]:
        return lambda: DataLoader(Loads(load, BATCHES, is_busy=is_busy), batch_size=None)

    return [
        Case(
            name=f"{kind}, {ratio} of a step",
            data=data(ratio * step, kind == "busy"),
            load_seconds=ratio * step,
            step_seconds=step,
            most_workers=MOST_WORKERS if kind == "asleep" else cores(),
        )
        for kind in ("asleep", "busy")
        for ratio in RATIOS
    ]


def library(options: Options, step: float) -> list[Case]:
    """The standard library in packs of 8192 tokens, 64 a batch, beside a long step and one of 26M tokens a second."""

    def data() -> PackedDataModule:
        return PackedDataModule(
            context=CONTEXT,
            batch_size=LIBRARY_ROWS,
            long_documents="split",
            documents=DocumentOptions(kept_apart=False, validation=0.0, seed=options.seed),
        )

    module = data()
    module.setup()
    loader = module.train_dataloader()
    assert isinstance(loader, PackedLoader)
    rows = loader.rows
    load = median(timed(partial(rows.__getitem__, range(first, first + LIBRARY_ROWS))) for first in range(50))
    return [
        Case(
            name=f"standard library, {name} step",
            data=data,
            load_seconds=load,
            step_seconds=seconds,
            most_workers=cores(),
        )
        for name, seconds in (("long", step), ("short", SHORT_STEP_SECONDS))
    ]


def cores() -> int:
    """How many workers can keep a core busy each; a step, which sleeps, needs none."""
    return max(1, int(usable_processors()))


def timed(build: Callable[[], object]) -> float:
    """Seconds; orders of magnitude count here, and no claim rests on them."""
    begin = time.perf_counter()
    build()
    return time.perf_counter() - begin


def tuned(case: Case) -> Result:
    """One case without workers and with the tuner."""
    before, _ = trained(case, None, BATCHES // 4)
    tuner = LoaderTuner()
    after, with_start = trained(case, tuner, BATCHES)
    workers = tuner.plan.num_workers
    return Result(
        before,
        after,
        case.is_promised,
        {
            "what": case.name,
            "load_ms": round(1000 * case.load_seconds, 2),
            "step_ms": round(1000 * case.step_seconds, 2),
            "workers": workers,
            "prefetch": tuner.plan.prefetch if workers else "",
            "stall_before_pct": round(before, 2),
            "stall_after_pct": round(after, 2),
            "after_with_start_pct": round(with_start, 2),
            "promised": case.is_promised,
        },
    )


def trained(case: Case, tuner: LoaderTuner | None, batches: int) -> tuple[float, float]:
    """Per cent of the second half's time in which the loop waited: without epochs' first batches, and with them."""
    profiler, data = Durations(), case.data()
    trainer = Trainer(
        max_steps=2 * batches,
        accelerator="cpu",
        callbacks=[] if tuner is None else [tuner],
        profiler=profiler,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    source = {"datamodule": data} if isinstance(data, LightningDataModule) else {"train_dataloaders": data}
    trainer.fit(Waits(case.step_seconds), **source)  # pyright: ignore[reportArgumentType]
    names = ("[_TrainingEpochLoop].train_dataloader_next", "run_training_batch")
    waits, steps = (np.array(profiler.recorded_durations[name])[batches : 2 * batches] for name in names)
    is_first = np.arange(batches, 2 * batches) % trainer.num_training_batches == 0

    def stall(counts: np.ndarray) -> float:
        return float(100 * waits[counts].sum() / (waits[counts].sum() + steps[counts].sum()))

    return stall(~is_first), stall(np.ones_like(is_first))


def packs(seed: int) -> tuple[Ratio, Ratio]:
    """Building packs, against transformers' collator, and against itself."""
    from transformers import DataCollatorWithFlattening

    store = Corpus(tokenizer_name="bytes", options=DocumentOptions()).read("python-stdlib")
    packing = pack(store.lengths, CONTEXT, long_documents="split", seed=seed)
    rows = PackedRows(store=store, packing=packing)
    tokens = [
        [store.tokens[begin : begin + length].astype(int).tolist() for begin, length in pieces(rows, row)]
        for row in range(PACKS)
    ]
    features = [[{"input_ids": piece} for piece in row] for row in tokens]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)

    def ours() -> None:
        for row in range(PACKS):
            rows[[row]]

    def theirs() -> None:
        for row in features:
            collate(row)

    same_packs(rows, features, collate)
    return paired_ratio(ours, theirs, seed=seed), paired_ratio(ours, ours, seed=seed)


def pieces(rows: PackedRows, row: int) -> list[tuple[int, int]]:
    """Where in the store a row's documents begin, and their lengths."""
    packing = rows.packing
    chosen = slice(packing.offsets[row], packing.offsets[row + 1])
    begins = rows.store.offsets[packing.documents[chosen]] + packing.starts[chosen]
    return list(zip(begins.tolist(), packing.lengths[chosen].tolist(), strict=True))


def same_packs(rows: PackedRows, features: list[list[dict[str, Any]]], collate: Any) -> None:
    """Raise unless both build the same."""
    for row in range(PACKS):
        batch, theirs = rows[[row]], collate(features[row])
        real = theirs["input_ids"].numel()  # rows are padded, flattened documents are not
        for key in ("input_ids", "labels", "position_ids"):
            if not torch.equal(batch[key][:, :real], theirs[key]):
                raise RuntimeError(f"{key} of row {row} differ from those of transformers' collator.")


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))

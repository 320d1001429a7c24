"""Micro-batches inside one optimizer step: distance from the unsplit batch, and time against plain accumulation.

Twenty AdamW steps with clipping, a scheduler and very uneven label counts, by the largest difference of any
weight. Then the time of a step in four parts against Lightning's own `accumulate_grad_batches=4` at equal sizes
(both trainers live in one process and step in turn), and the meter's cost where every byte is counted.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.__main__ import main_of
from benchmarks.harness import Options, Ratio, Report, paired_ratio, self_ratio_is_void
from examples.pretrain_causal_lm.model import CausalLM
from lightning_memkit import MemoryBudget

STEPS, BATCH, LENGTH, VOCABULARY = 20, 8, 12, 50


class Tagger(LightningModule):
    """A mean over the labels that are not -100."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(VOCABULARY, 32), nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, VOCABULARY)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy a label."""
        logits = self.head(self.mix(self.embedding(batch["x"]))[0])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        """AdamW at 1e-3 after a warm-up."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def run(options: Options) -> Report:
    """Exactness first, then time; `--quick` changes nothing, the whole takes about three minutes."""
    warnings.simplefilter("ignore")
    figures: dict[str, float | int | bool] = {}
    rows: list[dict[str, object]] = []
    for dtype, name in ((torch.float64, "max_weight_diff_fp64"), (torch.float32, "max_weight_diff")):
        whole = final_weights(dtype, options.seed)
        worst = 0.0
        for size in (1, 3, "auto"):
            parts = final_weights(dtype, options.seed, MemoryBudget("1GiB", micro_batch_size=size))
            difference = float((parts - whole).abs().max())
            worst = max(worst, difference)
            rows.append({"what": f"micro-batch {size}, {dtype}", "max_weight_diff": difference})
        figures[name] = worst
        control = final_weights(dtype, options.seed, accumulate=4)
        figures["control_weight_diff"] = float((control - whole).abs().max())
        rows.append(
            {"what": f"accumulate_grad_batches=4, {dtype}", "max_weight_diff": figures["control_weight_diff"]}
        )
    overhead, meter, itself = step_times(options)
    rows += [
        overhead.row("four parts : accumulate_grad_batches=4"),
        meter.row("every byte counted : not counted"),
        itself.row("accumulate_grad_batches=4 : itself"),
    ]
    figures["overhead_pct"] = 100 * (overhead.median - 1)
    figures["overhead_high_pct"] = 100 * (overhead.high - 1)
    figures["meter_overhead_pct"] = 100 * (meter.median - 1)
    figures["self_ratio"] = itself.median
    return Report("micro_batching", figures, rows, void=self_ratio_is_void(itself))


def final_weights(dtype: torch.dtype, seed: int, *callbacks: Any, accumulate: int = 1) -> Tensor:
    """Weights after 20 steps over the same samples."""
    torch.manual_seed(seed)
    module = Tagger().to(dtype)
    loader = DataLoader(samples(seed), batch_size=BATCH // accumulate)  # pyright: ignore[reportArgumentType]
    quiet_trainer(*callbacks, max_steps=STEPS, gradient_clip_val=0.5, accumulate_grad_batches=accumulate).fit(
        module, loader
    )
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def samples(seed: int) -> list[dict[str, Tensor]]:
    """Rows of which 1 to 12 labels count."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(STEPS * BATCH):
        x = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = x.roll(1).clone()
        labels[: int(torch.randint(0, LENGTH, (1,), generator=generator))] = -100
        rows.append({"x": x, "labels": labels})
    return rows


def quiet_trainer(*callbacks: Any, **options: Any) -> Trainer:
    """A Trainer on one CPU that writes nothing."""
    return Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks), **options,
    )  # fmt: skip


def step_times(options: Options) -> tuple[Ratio, Ratio, Ratio]:
    """Parts against accumulation, metered against not, and accumulation against itself."""
    pairs, rows = 100, 8
    parts = SteppedTrainer(rows, MemoryBudget("8GiB", micro_batch_size=rows // 4))
    metered = SteppedTrainer(rows, MemoryBudget("8GiB", micro_batch_size=rows // 4, enforce="always"))
    plain = SteppedTrainer(rows // 4, accumulate=4)
    try:
        overhead = paired_ratio(parts.step, plain.step, pairs=pairs, seed=options.seed)
        meter = paired_ratio(metered.step, parts.step, pairs=pairs, seed=options.seed)
        itself = paired_ratio(plain.step, plain.step, pairs=pairs, seed=options.seed)
    finally:
        for stepped in (parts, metered, plain):
            stepped.stop()
    return overhead, meter, itself


class SteppedTrainer:
    """A Trainer that takes one optimizer step each time it is told to, and rests in between.

    `fit` runs in a thread of its own and waits for the next batch; only one thread ever works.
    """

    def __init__(self, rows: int, *callbacks: Any, accumulate: int = 1) -> None:
        self._go, self._done, self._stopped = threading.Semaphore(0), threading.Semaphore(0), False
        self._batches_a_step, self._rows = accumulate, rows
        self._thread = threading.Thread(target=self._fit, args=(callbacks, accumulate), daemon=True)
        self._thread.start()
        self._done.acquire()

    def step(self) -> None:
        """Take one optimizer step."""
        self._go.release()
        self._done.acquire()

    def stop(self) -> None:
        """End the training."""
        self._stopped = True
        self._go.release()
        self._thread.join()

    def _fit(self, callbacks: tuple[Any, ...], accumulate: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        module = CausalLM(vocabulary_size=259, width=128, layers=4, heads=4, warmup_steps=1)
        trainer = quiet_trainer(
            *callbacks, max_steps=100_000, max_epochs=1, accumulate_grad_batches=accumulate
        )
        trainer.fit(module, _Batches(self._batch, self._wait))  # pyright: ignore[reportArgumentType]

    def _wait(self, index: int) -> bool:
        """Between optimizer steps: say that the last is done, and wait for the next."""
        if index % self._batches_a_step == 0 and not self._stopped:
            self._done.release()
            self._go.acquire()
        return not self._stopped

    def _batch(self) -> dict[str, Tensor]:
        ids = torch.arange(self._rows * 256).view(self._rows, 256) * 7 % 256
        return {"input_ids": ids, "labels": ids}


class _Batches:
    """An endless loader whose every batch is asked for."""

    def __init__(self, batch: Callable[[], dict[str, Tensor]], wait: Callable[[int], bool]) -> None:
        self._batch, self._wait = batch, wait

    def __len__(self) -> int:
        return 10_000_000

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        index = 0
        while self._wait(index):
            yield self._batch()
            index += 1


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))

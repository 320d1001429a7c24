"""A thousand steps under a tight budget with an OOM in every fiftieth: the fault-free run's result.

A small language model trains on documents whose lengths have a heavy tail, shuffled, each seen once. The budget is a
tenth above the smallest under which the longest documents fit one by one, and every byte of every step is counted
against it. In every fiftieth step one more allocation fails, another one each time. Then the same training runs
without budget and faults, with the partitions that the first one recorded, and all weights, optimizer states,
learning rates and random numbers are compared bit for bit.
"""

import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.__main__ import main_of
from benchmarks.harness import Options, Report
from benchmarks.micro_batching import quiet_trainer
from lightning_memkit import MemoryBudget
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.testing import Faults, count_allocations, fail_at

ROWS, VOCABULARY, WIDTH, LONGEST, IGNORED = 8, 2048, 64, 48, -100
EVERY, ABOVE_SMALLEST = 50, 1.1


class Documents(LightningModule):
    """Next tokens from the mean of those before, with dropout; remembers which documents its steps were given."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(0.1)
        self.mix, self.head = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.seen: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The mean loss of the labels that are not ignored."""
        tokens = self.dropout(self.embedding(batch["input_ids"]))
        before = tokens.cumsum(1) / torch.arange(1, tokens.shape[1] + 1)[:, None]
        logits = self.head(F.gelu(self.mix(torch.cat([tokens, before], dim=-1))))
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Once for every batch that has been trained."""
        self.seen += batch["document"].tolist()

    def configure_optimizers(self) -> Any:
        """AdamW after a warm-up."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Recording(MemoryBudget):
    """Notes the partition of every step, and lets one allocation of every fiftieth fail.

    Args:
        budget: bytes.
        seed: draws the allocation that fails.
        options: MemoryBudget's.
    """

    def __init__(self, budget: int, seed: int, **options: Any) -> None:
        super().__init__(budget, **options)
        self.partitions: list[tuple[int, int | None]] = []
        self.injected = 0
        self._draw = random.Random(seed)
        self._counted = 0

    def drive(self, step: Any, optimize: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """One optimizer step, with or without a fault in it."""
        with self._faults(step.trainer.global_step) as faults:
            result = super().drive(step, optimize)
        self._counted = faults.allocations
        self.injected += faults.fault is not None
        partition: Any = self._engine and self._engine.runner.partition
        self.partitions.append((self.history[-1][1], partition.row_tokens))
        return result

    def _faults(self, step: int) -> Faults:
        if step % EVERY != EVERY - 1:
            return count_allocations(armed=step % EVERY == EVERY - 2)
        return fail_at(self._draw.randrange(max(1, self._counted)))


class Replaying(MemoryBudget):
    """Takes the partitions that it is given, step by step."""

    def __init__(self, partitions: list[tuple[int, int | None]]) -> None:
        super().__init__("1GiB", micro_batch_size=1, recover=False)
        self._given = partitions

    def prepare(self, step: Any) -> None:
        """As always, then the partition of this step."""
        super().prepare(step)
        partition: Any = self._engine and self._engine.runner.partition
        partition.micro_batch_size, partition.row_tokens = self._given[step.trainer.global_step]


def run(options: Options) -> Report:
    """A thousand steps, or two hundred in a quick run."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    steps = 200 if options.quick else 1000
    smallest = MemoryBudget("1GiB", micro_batch_size=1)
    train(smallest, 1, options.seed)
    budget_bytes = int(ABOVE_SMALLEST * smallest.peak_bytes / (1 - smallest.headroom))
    faulty = Recording(budget_bytes, options.seed, enforce="always")
    module, state = train(faulty, steps, options.seed)
    again, expected = train(Replaying(faulty.partitions), steps, options.seed)
    equal = state.keys() == expected.keys() and all(same(state[name], expected[name]) for name in state)
    once = sorted(module.seen) == list(range(steps * ROWS)) and module.seen == again.seen
    sizes = [size for size, _ in faulty.partitions]
    figures: dict[str, float | int | bool] = {
        "optimizer_steps": len(faulty.partitions),
        "injected_ooms": faulty.injected,
        "retries": faulty.retries,
        "documents_seen_once": once,
        "bitwise_equal": equal,
        "partitions": len(set(faulty.partitions)),
        "peak_to_budget": faulty.peak_bytes / budget_bytes,
    }
    row: dict[str, object] = {
        "budget": format_bytes(budget_bytes),
        "smallest": format_bytes(smallest.peak_bytes / (1 - smallest.headroom)),
        **figures,
        "sizes": ", ".join(str(size) for size in sorted(set(sizes))),
        "tensors_compared": len(state),
    }
    notes = ("peak_to_budget: the highest peak of any step, every byte counted, over the budget.",)
    return Report("long_run", figures, [row], notes=notes)


def train(budget: MemoryBudget, steps: int, seed: int) -> tuple[Documents, dict[str, Any]]:
    """The module after so many steps from the seed, and all that a fault might have changed."""
    torch.manual_seed(seed)
    module = Documents()
    trainer = quiet_trainer(budget, max_steps=steps, gradient_clip_val=1.0)
    trainer.fit(module, documents(steps, seed))
    optimizer: Any = trainer.optimizers[0]
    states = {
        f"state {i} {key}": value
        for i, own in enumerate(optimizer.state.values())
        for key, value in own.items()
    }
    state = {**dict(module.named_parameters()), **states, "generator": torch.get_rng_state()}
    return module, {**state, "lr": optimizer.param_groups[0]["lr"], "global_step": trainer.global_step}


def documents(steps: int, seed: int) -> DataLoader:
    """Each document once, in an order of its own: half are shorter than 12 tokens, one in 36 has 48."""
    generator = torch.Generator().manual_seed(seed)
    samples: Any = []
    for index in range(steps * ROWS):
        uniform = float(torch.rand((), generator=generator))
        length = min(LONGEST, int(8 / max(uniform, 1e-4) ** 0.5))
        tokens = torch.randint(0, VOCABULARY, (length + 1,), generator=generator)
        samples.append({"input_ids": tokens[:-1], "labels": tokens[1:], "document": torch.tensor(index)})
    return DataLoader(samples, ROWS, shuffle=True, collate_fn=padded, generator=generator)


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Documents side by side, as long as the longest."""
    pad: Any = nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([sample["input_ids"] for sample in samples], batch_first=True),
        "labels": pad([sample["labels"] for sample in samples], batch_first=True, padding_value=IGNORED),
        "document": torch.stack([sample["document"] for sample in samples]),
    }


def same(one: Any, other: Any) -> bool:
    """Bit for bit, tensors and numbers alike."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))

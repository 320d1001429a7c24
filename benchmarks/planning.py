"""Plans against runs: whether configs stay within their budgets, and whether the order of step times is right.

The small language model of examples/pretrain_causal_lm, without any choice for memory in its config, is planned for
three budgets on this machine's CPU. Each plan's config is trained as it was written, in a process of its own, and
torch's profiler says what the allocator handed out at most in its steps (`of_budget`). Where `MemoryBudget` compares
a batch with its micro-batches, it may use what the steps leave of the budget (`compared_of_budget`). Before the first
step it also keeps copies on the host, which on a CPU is where everything is (`start_of_budget`).

Then every configuration that fits one of the budgets is trained, in turns and fresh processes, and the order of its
step times is compared with the plan's: Spearman's rank correlation, where times within 5 % count as ties. Whole runs
are timed, which can't be paired step by step as `paired_ratio` pairs them; the first configuration is timed twice a
round, and `self_ratio` says how far its two medians are apart.

At last models that no such machine holds are planned: a Llama of 8 billion parameters on one card of 24 GiB, with one
row and with eight, and one of 70 billion on 64 cards, with what they take. `memkit plan` prints the whole tables:

    memkit plan --config benchmarks/llama_8b.yaml --budget 24GiB --device rtx4090 --explain
    memkit plan --config benchmarks/llama_70b.yaml --device h100-80gb --explain
"""

import json
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from benchmarks.__main__ import main_of
from benchmarks.harness import Options, Report
from benchmarks.prediction_ranks import LENGTH, Llama
from examples.pretrain_causal_lm.model import CausalLM
from lightning_memkit import ActivationCheckpointing, Budget, ChunkedLoss, Plan, PureBF16Precision, plan
from lightning_memkit.memory.units import format_bytes, parse_bytes
from lightning_memkit.planning.problem import Row
from lightning_memkit.prediction.contained import contained

ROOT = Path(__file__).parents[1]
BUDGETS, ORDERED_AT = ("200MiB", "60MiB", "30MiB"), "30MiB"
ROUNDS, STEPS, TIE = 3, 5, 1.05
LARGE = (
    ("8b", 1, Budget("24GiB", "rtx4090"), {}),
    ("8b", 8, Budget("24GiB", "rtx4090"), {}),
    ("70b", 8, Budget("auto", "h100-80gb"), {"devices": 8, "num_nodes": 8}),
)
_RUN = """
import json, sys
from lightning_memkit import MemoryBudget
from lightning_memkit.cli import main
from lightning_memkit.memory.allocator_trace import AllocatorTrace
from lightning_memkit.micro_batching.parts.whole_comparison import WholeComparison

trace, sections = AllocatorTrace(), ["start"]

def marked(kind, name):
    plain = getattr(kind, name)
    def run(*args):
        trace.mark()
        sections.append("compared" if "peak" in sections else "start")
        plain(*args)
        trace.mark()
        sections.append("peak")
    setattr(kind, name, run)

marked(MemoryBudget, "prepare")
marked(WholeComparison, "compare")
with trace:
    status = main(sys.argv[1:])
if status or len(sections) == 1:  # `memkit plan` runs no step
    sys.exit(status)
found = dict.fromkeys(("start", "peak", "compared"), 0)
for section, size in zip(sections, trace.peaks_between, strict=True):
    found[section] = max(found[section], size)
print(json.dumps({f"{name}_bytes": size for name, size in found.items()}))
"""


def run(options: Options) -> Report:
    """Plan, train as planned, and compare."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    budgets = BUDGETS[-1:] if options.quick else BUDGETS
    with tempfile.TemporaryDirectory(prefix="memkit-") as folder:
        rows = [held(Path(folder), budget) for budget in budgets]
    began = time.perf_counter()
    found = plan(module(), batch(), Budget(ORDERED_AT, "cpu"))
    seconds = time.perf_counter() - began
    measured, again = timed(found, 1 if options.quick else ROUNDS)
    predicted = [row.seconds for row in found.fitting]
    rows += [
        compared(row, own, predicted, measured) for row, own in zip(found.fitting, measured, strict=True)
    ]
    rows += [] if options.quick else [large(*shape) for shape in LARGE]
    figures = {
        "budgets": len(budgets),
        "peak_over_budget_max": max(
            float(row[name])  # pyright: ignore
            for row in rows[: len(budgets)]
            for name in ("of_budget", "compared_of_budget")
        ),
        "prediction_error_max_pct": max(abs(float(row["error_pct"])) for row in rows[: len(budgets)]),  # pyright: ignore
        "plans": len(measured),
        "spread": max(measured) / min(measured),
        "spearman": spearman(predicted, measured),
        "self_ratio": again / measured[0],
        "plan_seconds": seconds,
    }
    return Report("planning", figures, rows)


def held(folder: Path, budget: str) -> dict[str, object]:
    """Plan the config for a budget, train what was written, and say what it took."""
    plain, planned = folder / "plain.yaml", folder / f"{budget}.yaml"
    plain.write_text(yaml.safe_dump(config(folder)))
    words = ["plan", "--config", str(plain), "--budget", budget, "--device", "cpu", "--output", str(planned)]
    table = _memkit(words)
    answer = _memkit(["fit", "--config", str(planned)])
    found = json.loads(answer.splitlines()[-1])
    peak = found["peak_bytes"]
    best = next(line for line in table.splitlines() if line.startswith("1 "))
    (taken,) = [cell for cell in best.split("  ") if cell.strip().endswith("iB")]
    predicted = parse_bytes(taken.strip())
    return {
        "what": f"{budget}: {best[3:30].strip()}",
        "predicted": format_bytes(predicted),
        "measured": format_bytes(peak),
        "of_budget": round(peak / parse_bytes(budget), 4),
        "start_of_budget": round(found["start_bytes"] / parse_bytes(budget), 4),
        "compared_of_budget": round(found["compared_bytes"] / parse_bytes(budget), 4),
        "error_pct": round(100 * (predicted / peak - 1), 2),
    }


def _memkit(words: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"memkit {' '.join(words)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def config(folder: Path) -> dict[str, Any]:
    """The example's, short, with nothing in it that saves memory."""
    example = ROOT / "examples" / "pretrain_causal_lm"
    found = yaml.safe_load((example / "budget.yaml").read_text())
    demo = yaml.safe_load((example / "demo.yaml").read_text())
    for section in ("model", "data"):
        found[section]["init_args"].update(demo[section]["init_args"])
    found["trainer"].update(demo["trainer"], max_steps=STEPS, default_root_dir=str(folder), accelerator="cpu")
    for name in ("plugins", "callbacks", "val_check_interval"):
        found["trainer"].pop(name, None)
    return found


def module() -> CausalLM:
    """The example's model at the size of its demo."""
    torch.manual_seed(0)
    return CausalLM(vocabulary_size=259, width=128, layers=4, heads=4)


def batch() -> dict[str, torch.Tensor]:
    """32 rows of 256 tokens."""
    ids = torch.randint(0, 259, (32, 256), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def timed(found: Plan, rounds: int) -> tuple[list[float], float]:
    """The median seconds of a step of every configuration that fits, in fresh processes; the first's again."""
    fitting = (*found.fitting, found.best)
    times = [[contained(partial(step_seconds, found, row)) for row in fitting] for _ in range(rounds)]
    *measured, again = (median(column) for column in zip(*times, strict=True))
    return measured, again


def step_seconds(found: Plan, row: Row) -> float:
    """A step's, when the first two are over."""
    clock = _Clock()
    kwargs = found.trainer_kwargs(row)
    kwargs["callbacks"] = [*kwargs.get("callbacks", []), clock]
    trainer = Trainer(
        **kwargs, max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module(), _Batches())
    return median(clock.seconds[2:])


class _Batches:
    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Any]:
        for _ in range(STEPS):
            yield batch()


class _Clock(Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def compared(row: Row, own: float, predicted: list[float], measured: list[float]) -> dict[str, object]:
    """A line of the table: times over the fastest's."""
    return {
        "what": f"{row.family}, {row.micro_batch_size} x {row.parts}",
        "predicted": round(row.seconds / min(predicted), 3),
        "measured": round(own / min(measured), 3),
        "of_budget": "",
        "start_of_budget": "",
        "compared_of_budget": "",
        "error_pct": "",
    }


class LlamaRows(Llama):
    """A Llama of a shape with a loader of its own: so many rows of 4,096 tokens."""

    def __init__(self, shape: str, rows: int) -> None:
        super().__init__(shape)
        self.rows = rows

    def train_dataloader(self) -> DataLoader[Any]:
        """One batch."""
        return DataLoader([ids_and_labels(self.rows)], batch_size=None)  # pyright: ignore[reportArgumentType]


def ids_and_labels(rows: int) -> dict[str, torch.Tensor]:
    """Zeros: values don't matter to a prediction."""
    ids = torch.zeros(rows, LENGTH, dtype=torch.int64, device="cpu")
    return {"input_ids": ids, "labels": ids}


def large(shape: str, rows: int, budget: Budget, given: dict[str, Any]) -> dict[str, object]:
    """The best of a plan, or what takes the least where nothing fits."""
    fixed = {
        "plugins": PureBF16Precision(),
        "callbacks": [ActivationCheckpointing("full"), ChunkedLoss()],
        **given,
    }
    found = plan(partial(Llama, shape), ids_and_labels(rows), budget, trainer=fixed)
    predicted = [row for row in found.rows if row.taken_bytes]
    row = found.best if found.fitting else min(predicted, key=lambda row: row.taken_bytes)
    verdict = "fits" if row.fits else row.rejected
    ranks = given.get("devices", 1) * given.get("num_nodes", 1)
    return {
        "what": f"{shape}, {row.micro_batch_size} of {rows} rows, on {ranks} {budget.device}: {row.family}",
        "predicted": format_bytes(row.taken_bytes),
        "measured": verdict,
        "of_budget": round(row.taken_bytes / budget.bytes(), 4),
        "start_of_budget": "",
        "compared_of_budget": "",
        "error_pct": "",
    }


def spearman(first: list[float], second: list[float]) -> float:
    """Spearman's rank correlation, with ties."""
    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def ranks(values: list[float]) -> list[float]:
    """Mean ranks; a value within 5 % of the smallest of a group of ties belongs to it."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found, begin = [0.0] * len(values), 0
    for place in range(1, len(order) + 1):
        if place == len(order) or values[order[place]] > TIE * values[order[begin]]:
            for index in order[begin:place]:
                found[index] = (begin + place - 1) / 2
            begin = place
    return found


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))

"""Predicted against measured peak memory of training, on CPU, through Lightning's own loop.

17 classes of transformers from configs, Lightning's demo Transformer, an MLP, two CNNs and the packed example, each
in eight cells of a Latin square over precision (float32, bf16-mixed, pure bfloat16 with Kahan summation), optimizer
(AdamW as loop, foreach and fused, SGD with momentum, bitsandbytes' AdamW8bit), activation checkpointing (none, full,
selective; models without repeated blocks have none) and micro-batch (1, 4, 16). Each cell is trained for two steps in
a process of its own; what its allocator handed out and took back is torch's profiler's word, from before the model is
built.

`accelerate_median_error_pct` is that of accelerate's rule, four times the weights in float32, and
`deepspeed_median_error_pct` that of DeepSpeed's rule for ZeRO-2 on one device, 20 bytes a parameter: neither looks at
activations. Quick runs take 24 cells.
"""

import gc
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from benchmarks import _prediction_gpu
from benchmarks.__main__ import main_of
from benchmarks._prediction_models import Subject, subjects
from benchmarks.harness import Options, Report
from lightning_memkit import ActivationCheckpointing, PureBF16Precision
from lightning_memkit.memory.allocator_trace import AllocatorTrace
from lightning_memkit.plugins.prediction import predict_memory
from lightning_memkit.prediction.contained import contained

PRECISIONS = ("float32", "bf16-mixed", "bfloat16, Kahan")
OPTIMIZERS = ("AdamW loop", "AdamW foreach", "AdamW fused", "SGD", "AdamW8bit")
POLICIES = ("none", "full", "selective")
MICRO_BATCHES = (1, 4, 16)
CELLS_A_MODEL = 8
QUICK_CELLS = 24


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is trained, and how."""

    subject: Subject
    precision: str
    optimizer: str
    policy: str
    micro_batch: int


class Trained(LightningModule):
    """Any model with a loss, and an optimizer by name."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.cell = cell
        self.model = cell.subject.build()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The subject's loss."""
        loss = self.cell.subject.loss(self.model, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Optimizer:
        """The cell's optimizer."""
        parameters, name = self.parameters(), self.cell.optimizer
        if name == "AdamW8bit":
            from bitsandbytes.optim import AdamW8bit

            return AdamW8bit(parameters, lr=1e-3)
        if name == "SGD":
            return SGD(parameters, lr=1e-3, momentum=0.9)
        kind = name.rpartition(" ")[2]
        return AdamW(parameters, lr=1e-3, foreach=kind == "foreach", fused=kind == "fused")


class Batches:
    """Two batches, one after the other, as a loader would make them."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Any]:
        for _ in range(2):
            yield self.cell.subject.batch(self.cell.micro_batch)


def run(options: Options) -> Report:
    """Predict and measure every cell."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    chosen = cells(options.seed)
    if options.quick:
        picked = np.random.default_rng(options.seed).choice(len(chosen), QUICK_CELLS, replace=False)
        chosen = [chosen[index] for index in sorted(picked)]
    rows, errors = [], {"ours": [], "accelerate": [], "deepspeed": []}
    for cell in chosen:
        predicted = contained(partial(predict, cell))
        measured, parameters = contained(partial(measure, cell))
        rules = {"ours": predicted, "accelerate": 4 * 4 * parameters, "deepspeed": 20 * parameters}
        for name, rule in rules.items():
            errors[name].append(100 * (rule / measured - 1))
        rows.append(
            {
                "model": cell.subject.name,
                "precision": cell.precision,
                "optimizer": cell.optimizer,
                "policy": cell.policy,
                "micro_batch": cell.micro_batch,
                "predicted_bytes": predicted,
                "measured_bytes": measured,
                **{f"{name}_error_pct": round(values[-1], 3) for name, values in errors.items()},
            }
        )
        gc.collect()
    off = {name: np.abs(values) for name, values in errors.items()}
    figures = {
        "cases": len(rows),
        "median_error_pct": float(np.median(off["ours"])),
        "p95_error_pct": float(np.quantile(off["ours"], 0.95)),
        "max_error_pct": float(off["ours"].max()),
        "accelerate_median_error_pct": float(np.median(off["accelerate"])),
        "deepspeed_median_error_pct": float(np.median(off["deepspeed"])),
    }
    return Report("prediction", figures, rows)


def run_gpu(options: Options) -> Report:
    """Models of 1 and 8 billion parameters against what CUDA's allocator hands out and reserves."""
    warnings.simplefilter("ignore")
    cases = _prediction_gpu.QUICK if options.quick else _prediction_gpu.CASES
    # All first: forks predict nothing once this process has used the GPU.
    predictions = [_prediction_gpu.predicted(case) for case in cases]
    rows: list[dict[str, object]] = []
    errors: dict[str, list[float]] = {"allocated": [], "reserved": []}
    for case, prediction in zip(cases, predictions, strict=True):
        peaks = _prediction_gpu.measured(case)
        said = {"allocated": prediction.allocated_bytes, "reserved": prediction.reserved_bytes}
        for name, values in errors.items():
            values.append(100 * (said[name] / peaks[name] - 1))
        rows.append(
            dict[str, object](what=f"{case.shape}, {case.precision}, {case.policy}, {case.micro_batch}")
            | {f"predicted_{name}_bytes": count for name, count in said.items()}
            | {f"measured_{name}_bytes": count for name, count in peaks.items()}
            | {f"{name}_error_pct": round(values[-1], 3) for name, values in errors.items()}
        )
    figures: dict[str, float | int | bool] = {"cases": len(rows)}
    for name, values in errors.items():
        figures[f"{name}_median_error_pct"] = float(np.median(np.abs(values)))
        figures[f"{name}_max_error_pct"] = float(np.abs(values).max())
    return Report("prediction_gpu", figures, rows)


def cells(seed: int) -> list[Cell]:
    """Eight a model: every two levels of two factors meet, in an order that the seed turns."""
    found = []
    for number, subject in enumerate(subjects()):
        policies = POLICIES if subject.has_blocks else POLICIES[:1]
        for place in range(CELLS_A_MODEL):
            turn = seed + number + place
            found.append(
                Cell(
                    subject=subject,
                    precision=PRECISIONS[turn % 3],
                    optimizer=OPTIMIZERS[(turn + number) % 5],
                    policy=policies[(turn + place // 3) % len(policies)],
                    micro_batch=MICRO_BATCHES[(number + place // 3 + 2 * place) % 3],
                )
            )
    return found


def trainer_options(cell: Cell) -> dict[str, Any]:
    """The plugins of a cell."""
    options: dict[str, Any] = {}
    if cell.precision == "bf16-mixed":
        options["precision"] = "bf16-mixed"
    elif cell.precision != "float32":
        options["plugins"] = [PureBF16Precision()]
    if cell.policy != "none":
        options["callbacks"] = [ActivationCheckpointing(cell.policy)]
    return options


def predict(cell: Cell) -> int:
    """The predicted peak in bytes."""
    torch.manual_seed(0)
    prediction = predict_memory(
        Trained(cell), cell.subject.batch(cell.micro_batch), trainer=trainer_options(cell)
    )
    return prediction.peak_bytes


def measure(cell: Cell) -> tuple[int, int]:
    """The measured peak in bytes, and the number of parameters."""
    torch.manual_seed(0)
    with AllocatorTrace() as trace:
        module: nn.Module = Trained(cell)
        trainer = Trainer(
            **trainer_options(cell),
            max_steps=2,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, Batches(cell))  # pyright: ignore[reportArgumentType]
    return trace.peak_bytes, sum(parameter.numel() for parameter in module.parameters())


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))

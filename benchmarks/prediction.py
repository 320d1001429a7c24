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
from functools import partial

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import nn

from benchmarks.__main__ import main_of
from benchmarks._gpu_rows import GpuRow
from benchmarks._prediction_cells import OPTIMIZERS, PRECISIONS, Batches, Cell, Trained, trainer_options
from benchmarks._prediction_gpu import rows_of_predictions
from benchmarks._prediction_models import subjects
from benchmarks.harness import Options, Report
from lightning_memkit.memory.allocator_trace import AllocatorTrace
from lightning_memkit.plugins.planning.prediction import predict_memory
from lightning_memkit.prediction.contained import contained

POLICIES = ("none", "full", "selective")
MICRO_BATCHES = (1, 4, 16)
CELLS_A_MODEL = 8
QUICK_CELLS = 24


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


def gpu_rows(options: Options) -> list[GpuRow]:
    """What CUDA's allocator hands out and reserves, for models large and small; a row a model."""
    return rows_of_predictions(options)


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

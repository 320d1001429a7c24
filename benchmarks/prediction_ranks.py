"""Predicted against measured peak memory of a rank among several, and what predictions of large models cost.

A small transformer and an MLP train for two steps on 2 and 4 ranks that gloo connects, under DDP, ZeRO-1 and FSDP2
(stages 2 and 3), in float32 and in pure bfloat16 with Kahan summation, with and without activation checkpointing; the
measured peak is that of the rank that took the most, by torch's profiler, and of two runs the larger one: that is what
a budget has to hold. The predictions come from one process.

Then Llama shapes of 0.1 to 70 billion parameters are predicted for an H100 that is not there: on one device, 8B on 8
ranks and 70B on 64 (8 nodes) under FSDP2, each in a process of its own, whose processor time and memory count.
Quick runs take the transformer on 2 ranks, and no one-device shapes above 1B.
"""

import logging
import resource
import warnings
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import AdamW, Optimizer

from benchmarks.__main__ import main_of
from benchmarks._measured_prediction_ranks import measured
from benchmarks._prediction_ranks import Case, predict
from benchmarks.harness import Options, Report
from lightning_memkit import ActivationCheckpointing, PureBF16Precision
from lightning_memkit.plugins.planning.prediction import predict_memory
from lightning_memkit.prediction.contained import contained

STRATEGIES = ("ddp", "zero1", "stage 2", "stage 3")
VARIANTS = (("none", "foreach"), ("full", "loop"))
LENGTH = 4096
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
             "vocab_size": 512},  # to see that code runs
    "100m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048,
             "vocab_size": 32_000},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
           "intermediate_size": 8192, "vocab_size": 128_256},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
           "intermediate_size": 14_336, "vocab_size": 128_256},
    "70b": {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
            "intermediate_size": 28_672, "vocab_size": 128_256},
}  # fmt: skip
ONE: dict[str, Any] = {}
SIZES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("100m", ONE),
    ("1b", ONE),
    ("8b", ONE),
    ("70b", ONE),
    ("8b", {"strategy": "memkit_fsdp2", "devices": 8}),
    ("70b", {"strategy": "memkit_fsdp2", "devices": 8, "num_nodes": 8}),
)
QUICK = ("100m", "1b")


class Llama(LightningModule):
    """A Llama of a shape, with AdamW."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model: Any = LlamaForCausalLM(LlamaConfig(**SHAPES[shape], use_cache=False))  # pyright: ignore

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The model's own loss."""
        return self.model(**batch).loss

    def configure_optimizers(self) -> Optimizer:
        """AdamW with torch's defaults."""
        return AdamW(self.parameters(), lr=1e-4)


def run(options: Options) -> Report:
    """Predict and measure small models; predict large ones."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows = compared(options)
    errors = np.abs([row["error_pct"] for row in rows])
    figures: dict[str, float | int | bool] = {
        "cases": len(rows),
        "median_error_pct": float(np.median(errors)),
        "max_error_pct": float(errors.max()),
    }
    host_peaks = []
    for shape, asked in SIZES:
        if options.quick and not asked and shape not in QUICK:
            continue
        row = contained(partial(cost, shape, asked))
        many = f"_on_{row['ranks']}" if row["ranks"] > 1 else ""
        figures[f"predicted_cpu_seconds_{shape}{many}"] = row["cpu_seconds"]
        if shape == "70b":
            host_peaks.append(row["host_peak_bytes"])
        rows.append(row)
    figures["host_peak_bytes_70b"] = max(host_peaks)
    return Report("prediction_ranks", figures, rows)


def compared(options: Options) -> list[dict[str, Any]]:
    """A row for each small case."""
    rows = []
    for ranks in (2,) if options.quick else (2, 4):
        cases = [
            Case(
                model=model,
                ranks=ranks,
                strategy=strategy,
                precision=precision,
                policy=policy,
                optimizer=optimizer,
            )
            for model in (("transformer",) if options.quick else ("transformer", "mlp"))
            for strategy in STRATEGIES
            for precision in ("float32", "kahan")
            for policy, optimizer in VARIANTS
        ]
        for case, found in zip(cases, measured(cases, timeout_s=3000), strict=True):
            told = predict(case)
            rows.append(
                {
                    "model": case.model,
                    "ranks": case.ranks,
                    "strategy": case.strategy,
                    "precision": case.precision,
                    "policy": case.policy,
                    "optimizer": case.optimizer,
                    "predicted_bytes": told,
                    "measured_bytes": found.most,
                    "least_measured_bytes": found.least,
                    "error_pct": round(100 * (told / found.most - 1), 3),
                }
            )
    return rows


def cost(shape: str, asked: dict[str, Any]) -> dict[str, Any]:
    """What a prediction takes of this process and the fork that it runs in; for a process of its own."""
    import transformers

    transformers.LlamaForCausalLM  # noqa: B018  # imported on use, which is no part of the prediction
    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    plugins = {"plugins": [PureBF16Precision()], "callbacks": [ActivationCheckpointing("full")]}
    before = _seconds()
    found = predict_memory(
        partial(Llama, shape),
        {"input_ids": ids, "labels": ids},
        trainer={**asked, **plugins},
        device="h100-80gb",
        timeout_s=1800,
    )
    return {
        "model": f"Llama {shape}",
        "ranks": found.ranks,
        "strategy": asked.get("strategy", "one device"),
        "precision": "kahan",
        "policy": "full",
        "predicted_bytes": found.peak_bytes,
        "reserved_bytes": found.reserved_bytes,
        "cpu_seconds": round(_seconds() - before, 1),
        "host_peak_bytes": 1024 * max(resource.getrusage(who).ru_maxrss for who in _WHO),
    }


_WHO = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def _seconds() -> float:
    used = [resource.getrusage(who) for who in _WHO]
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    raise SystemExit(main_of(__file__))

"""What counts as rounding between a batch's loss and the sum of its micro-batches' losses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_memkit.micro_batching.parts.loss_rounding import difference

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def apart(
    whole: float, summands: list[float], dtype: torch.dtype, precision: str = "32-true", rows: int = 8
) -> float:
    model_dtype = BF16 if precision.startswith("bf16-true") else dtype
    run = SimpleNamespace(module=nn.Linear(2, 2, dtype=model_dtype), precision=precision)
    step: Any = SimpleNamespace(run=run, batch=torch.zeros(rows, 2))
    parts = [torch.tensor(value, dtype=F64) for value in summands]
    return difference(step, torch.tensor(whole, dtype=dtype), torch.stack(parts).sum(), parts)


@pytest.mark.parametrize(
    ("whole", "summands", "dtype", "precision"),
    [
        (2.0, [1.0, 1.001], F32, "32-true"),
        (2.0, [1.0, 1.0000005], F64, "64-true"),
        (3e-9, [0.3, -0.3], F32, "32-true"),  # rows that cancel
        (1e-12, [0.3, -0.3], F64, "64-true"),
        (2.0, [1.0, 1.03], F32, "bf16-mixed"),
        (2.0, [1.0, 1.03], BF16, "bf16-true"),
        (float("nan"), [1.0, float("nan")], F32, "32-true"),
        (float("inf"), [1.0, 1.0], F32, "32-true"),
    ],
)
def test_rounding_is_no_difference(whole: float, summands: list[float], dtype: Any, precision: str) -> None:
    assert apart(whole, summands, dtype, precision) == 0


@pytest.mark.parametrize(
    ("whole", "summands", "dtype", "precision", "rows"),
    [
        (2.0, [1.0, 1.1], F32, "32-true", 8),
        (2.0, [1.0, 1.00001], F64, "64-true", 8),
        (0.01, [0.3, -0.3], F32, "32-true", 8),
        (2.0, [1.0, 1.2], F32, "bf16-mixed", 8),
        (2.01, [1.0, 1.06], F32, "bf16-mixed", 512),  # more rows average more rounding out
    ],
)
def test_what_rounding_does_not_explain_is_told_with_its_size(
    whole: float, summands: list[float], dtype: Any, precision: str, rows: int
) -> None:
    found = apart(whole, summands, dtype, precision, rows)
    assert found == pytest.approx(abs(whole - sum(summands)) / max(whole, sum(map(abs, summands))), rel=1e-6)

"""Estimate the memory for what `Trainer.predict` gathers: the outputs of every batch, on the host."""

import warnings
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.memory.measure import capacity
from lightning_memkit.memory.units import format_bytes
from lightning_memkit.micro_batching.evaluation.step import EvaluationStep
from lightning_memkit.micro_batching.sizes.sizing import BudgetError
from lightning_memkit.utilities.tensors import tensors_of

_REMEDY = (
    "Trainer.predict(return_predictions=False) with a BasePredictionWriter(write_interval='batch'), or a predict_step "
    "that returns less (class indices for logits; .clone() of a slice, which else keeps the whole tensor)"
)


def check_predictions(step: EvaluationStep, output: Any, device: torch.device, budget_bytes: int) -> None:
    """After a loader's first batch, check the estimated size of all outputs against host memory and budget.

    Lightning moves the outputs to the host and keeps them until the end, when they are returned or given to a
    writer. The estimate assumes that every batch's output is as large as the first.

    Raises:
        BudgetError: the outputs exceed the free host memory.
    """
    if step.hook != "predict_step":
        return
    batches = step.outputs_kept
    if batches in (0, float("inf")):
        return
    made, on_host = bytes_of(output), device.type == "cpu"
    total, free = int(made * batches), capacity(torch.device("cpu")).free_bytes
    what = (
        f"Trainer.predict keeps the outputs of {batches:.0f} batches, about {format_bytes(total)} at "
        f"{format_bytes(made)} a batch"
    )
    if total > free:
        raise BudgetError(f"{what}, and the host has {format_bytes(free)} free. What would help: {_REMEDY}.")
    if on_host and total > budget_bytes:
        warnings.warn(
            f"{what}, which exceeds the budget of {format_bytes(budget_bytes)}; it counts what steps need, not what "
            f"is gathered. What would help: {_REMEDY}.",
            stacklevel=2,
        )


def bytes_of(output: Any) -> int:
    """The bytes that an output keeps alive: of whole storages, each counted once if views share it."""
    storages: dict[int, int] = {}
    for tensor in tensors_of(output):
        storages.update(_storage(tensor))
    return sum(storages.values())


def _storage(tensor: Tensor) -> dict[int, int]:
    if tensor.layout is not torch.strided:
        return {id(tensor): tensor.numel() * tensor.element_size()}
    storage = tensor.untyped_storage()
    return {storage.data_ptr(): storage.nbytes()}

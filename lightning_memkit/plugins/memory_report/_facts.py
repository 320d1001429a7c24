"""Facts about a run, and its current use of device memory."""

from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_memkit.memory.anatomy import Anatomy
from lightning_memkit.memory.report import RunFacts
from lightning_memkit.plugins.asked import budget_of, callbacks_of, says


def facts(trainer: Trainer, step: int) -> RunFacts:
    """Describe the run."""
    module, budget, device = trainer.lightning_module, budget_of(trainer), trainer.strategy.root_device
    parts = 0 if budget is None or not budget.history else budget.history[-1].micro_batch_size
    return RunFacts(
        name=type(module).__name__,
        step=step,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        precision=_precision(trainer),
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        micro_batch_size=parts,
        budget_bytes=0 if budget is None else budget.budget_bytes,
        forecast_bytes=0 if budget is None else budget.predicted_peaks.get(parts, 0),
        retries=0 if budget is None else budget.retries,
        recomputes=any(says(one, "recomputes_activations") for one in callbacks_of(trainer)),
        offloads=any(says(one, "offloads_states") for one in callbacks_of(trainer)),
    )


def _precision(trainer: Trainer) -> str:
    """Lightning's name, with what `PureBF16Precision` has chosen for gradients that add up over micro-batches."""
    name, parameters = str(trainer.precision_plugin.precision), trainer.lightning_module.parameters()
    wide = any(
        one.dtype == torch.bfloat16 and getattr(one, "grad_dtype", None) == torch.float32
        for one in parameters
    )
    return f"{name}, gradients in float32" if wide else name


def device_bytes(trainer: Trainer, anatomy: Anatomy | None, live_bytes: int) -> dict[str, float]:
    """Memory in use, its peak and its budget, by the names under which they are logged.

    They are read from the device's allocator if it counts. Otherwise they are those of the metered step, with
    a peak of at least what MemoryBudget has measured.
    """
    device, budget = trainer.strategy.root_device, budget_of(trainer)
    module: Any = torch.get_device_module(device)
    values: dict[str, float] = {}
    if device.type != "cpu" and hasattr(module, "max_memory_allocated"):
        values["memory_gib"] = module.memory_allocated(device) / 2**30
        values["peak_gib"] = module.max_memory_allocated(device) / 2**30
    elif anatomy is not None:
        seen = 0 if budget is None else budget.peak_bytes
        values["memory_gib"] = live_bytes / 2**30
        values["peak_gib"] = max(anatomy.peak_bytes, seen) / 2**30
    if budget is not None:
        values["budget_gib"] = budget.budget_bytes / 2**30
        values["retries"] = float(budget.retries)
    return values

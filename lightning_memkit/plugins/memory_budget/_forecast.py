"""Predict the peaks of all micro-batch sizes before measuring, and what would fit if none does."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_memkit.memory.units import format_bytes
from lightning_memkit.micro_batching.options import BudgetOptions
from lightning_memkit.micro_batching.sizes.sizing import Foreseen
from lightning_memkit.planning.budget import Budget
from lightning_memkit.planning.problem import Row
from lightning_memkit.planning.sizes import reach
from lightning_memkit.plugins.planning._given_run import GivenRun, is_automatic, predict_apart
from lightning_memkit.plugins.planning.planning import plan
from lightning_memkit.plugins.planning.prediction import predict_memory
from lightning_memkit.plugins.seams._worst_batch import worst_batch
from lightning_memkit.plugins.seams.bars import info
from lightning_memkit.prediction.residuals import keep_residual, residual_of
from lightning_memkit.utilities.tensors import tensors_of

PAYS_FROM_PARAMETERS = 100_000_000  # with fewer, trials are faster than a prediction
_SIZES, _LEAST_ROWS = (2, 4), 8  # sizes that span the line; fewer rows leave little choice
_MOST_SECONDS = 180.0


def foreseen(trainer: Trainer, options: BudgetOptions, batch: Any, sizes: Sequence[int]) -> Foreseen | None:
    """The predicted peaks of `sizes`, from two predictions; None if measuring is cheaper, or the only way.

    Called before the first step: the model is on its training device and nothing has run there yet.
    """
    root = trainer.strategy.root_device
    parameters = sum(parameter.numel() for parameter in trainer.lightning_module.parameters())
    if trainer.world_size > 1 or parameters < PAYS_FROM_PARAMETERS or max(sizes) < _LEAST_ROWS:
        return None
    if root.type not in ("cpu", "cuda"):
        return None
    device = None if root.type == "cpu" else Budget().target()  # asked here: a fork finds no device
    budget = Budget(options.budget_bytes, device or "cpu", "speed", options.headroom)
    info(trainer, "MemoryBudget predicts the peaks of its sizes, before it measures one.")
    # Read batches in this process, not in the fork: a loader's workers serve only the process that started
    # them.
    parts = {size: worst_batch(trainer, batch, size) for size in (*_SIZES, max(sizes))}
    if root.type == "cuda":  # whose tensors no fork can read once CUDA is initialised
        batch, parts = apply_to_collection((batch, parts), Tensor, lambda tensor: tensor.detach().cpu())
    try:
        has_automatic = any(map(is_automatic, vars(trainer)["callbacks"]))
        found, name = predict_apart(
            trainer,
            lambda given: _predicted(given, batch, parts, sizes, budget),
            timeout_s=_MOST_SECONDS,
        )
        peaks = {} if has_automatic else found.peaks
        return replace(found, peaks=peaks, residual=residual_of(name), measured=partial(keep_residual, name))
    except Exception as error:  # a user's step, or its prediction, may raise anything
        said = str(error).strip().splitlines()
        info(trainer, f"MemoryBudget measures sizes without a prediction: {said[0] if said else error!r}")
        return None


def _predicted(
    given: GivenRun, batch: Any, parts: Mapping[int, Any], sizes: Sequence[int], budget: Budget
) -> tuple[Foreseen, str]:
    """The prediction, and the name of the device whose residual corrects it."""
    device = budget.target()
    parts = {size: part if device is None else _alone(part) for size, part in parts.items()}
    beside = 0 if device is None else device.context_bytes
    predictions = {
        size: predict_memory(given.module, parts[size], trainer=given.arguments, device=device or "cpu")
        for size in _SIZES
    }
    peak_of = reach({size: (one, one.total_bytes - beside) for size, one in predictions.items()})
    rest = 0 if device is not None else _beside_parts(batch, parts[_SIZES[0]])
    peaks = {size: int(peak_of(size)) + rest for size in sizes}
    fits = min(peaks.values()) <= budget.usable_bytes()
    remedy = "" if fits else _remedy(given, parts[max(sizes)], budget)
    return Foreseen(peaks=peaks, remedy=remedy), "cpu" if device is None else device.name


def _alone(part: Any) -> Any:
    return apply_to_collection(part, Tensor, Tensor.clone)


def _beside_parts(batch: Any, part: Any) -> int:
    """Bytes of the whole batch, which is in memory on the CPU, except storages of which `part` is a view."""
    held = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(part)}
    storages = {one.data_ptr(): one.nbytes() for one in (t.untyped_storage() for t in tensors_of(batch))}
    return sum(size for address, size in storages.items() if address not in held)


def _remedy(given: GivenRun, batch: Any, budget: Budget) -> str:
    """The fastest exact configuration that fits and the fastest of all; if none fits, the smallest one."""
    constraints = {**given.arguments, "accumulate_grad_batches": given.accumulated}
    if constraints.get("precision") == "32-true":  # Lightning's default, not the user's choice
        del constraints["precision"]
    found = plan(given.module, batch, budget, trainer=constraints)
    if not found.fitting:
        predicted = [row for row in found.rows if row.taken_bytes]
        least = min(predicted, key=lambda row: row.taken_bytes, default=None)
        what = "" if least is None else f"; the least is {_said(least)}"
        return f"Nothing that may be chosen fits, as predicted{what}."
    exact = next((row for row in found.fitting if not row.family.changes), None)
    rows = [row for row in dict.fromkeys((exact, found.best)) if row is not None]
    return f"What fits, as predicted: {'; or '.join(map(_said, rows))}."


def _said(row: Row) -> str:
    changes = f"changes {row.family.changes}" if row.family.changes else "changes no numbers"
    size = format_bytes(row.taken_bytes)
    return f"{row.family} with a micro-batch of {row.micro_batch_size}, predicted at {size} ({changes})"

"""May the parts of this run's padded batches be formed by tokens? Asked of its own module, before step 1."""

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_memkit import decomposability
from lightning_memkit.micro_batching import Weigher, batch_size, normalized
from lightning_memkit.plugins import _seam
from lightning_memkit.plugins._parts import Partition
from lightning_memkit.plugins._probe import deterministic
from lightning_memkit.plugins._ranks import any_rank, largest_of_ranks
from lightning_memkit.plugins._tensors import tensors_of
from lightning_memkit.plugins._trials import StepFailedError, Trials
from lightning_memkit.plugins._worst_batch import worst_batch
from lightning_memkit.token_parts import TokenPart, extent_of, take_part


def form_by_tokens(step: _seam.Step, trials: Trials, partition: Partition, usable_bytes: int) -> None:
    """Let a partition form its parts by tokens, where that saves something, is exact, and was measured to fit.

    Exact: the gradient of a short and a long row together is that of both apart, the short one without padding.
    A module that looks at padding (no mask in its attention, positions counted from the right) fails this, and its
    batches are split by rows.
    """
    row_tokens = _columns(worst_batch(step.trainer, step.batch, 1)) or _columns(step.batch)
    if partition.whole or partition.summed or partition.split is not None or row_tokens is None:
        return
    if partition.micro_batch_size >= batch_size(step.batch) or _seam.communicates_in_every_part(step.trainer):
        return
    partition.row_tokens = row_tokens
    useful = partition.cut(step.batch).places is not None
    partition.row_tokens = None
    if not any_rank(step.trainer, useful):
        return
    error = largest_of_ranks(step.trainer, [_error(step, trials, partition.weigh)])[0]
    module = step.trainer.lightning_module
    exact = str(step.trainer.precision_plugin.precision) in ("32-true", "64-true")
    if error > decomposability.tolerance(module.parameters(), reduced=not exact):
        rank_zero_info(
            f"MemoryBudget splits by rows: without their padding, short rows' gradient differs by {error:.1%}, so the "
            "module looks at padding."
        )
        return
    partition.row_tokens = row_tokens
    largest = max(partition.cut(step.batch).parts, key=batch_size)
    resident = list(tensors_of(step.batch))
    with trials.optimizer_state(step) as (states, _):
        peak = trials.peak_of(step, largest, [*states, *resident], usable_bytes)
    if any_rank(step.trainer, peak is None or peak > usable_bytes):
        partition.row_tokens = None


def _columns(batch: Any) -> int | None:
    extent = extent_of(batch)
    return None if extent is None else extent.columns


def _error(step: _seam.Step, trials: Trials, weigh: Weigher) -> float:
    """How far the shortest and the longest row's gradients, apart and without padding, miss that of both together."""
    extent = extent_of(step.batch)
    if extent is None:
        return float("inf")
    lengths = extent.lengths
    rows = sorted({lengths.index(min(lengths)), lengths.index(max(lengths))})
    if len(rows) < 2:
        return float("inf")
    whole = TokenPart(rows=tuple(rows), start=0, stop=extent.columns)
    both = take_part(step.batch, whole, extent.columns)
    apart = [
        take_part(
            step.batch,
            TokenPart(rows=(row,), start=int(extent.first[row]), stop=int(extent.stop[row])),
            extent.columns,
        )
        for row in rows
    ]
    try:
        with deterministic(step.trainer.lightning_module, everything=True):
            together = trials.gradient_of(step, both)
            gradients = [trials.gradient_of(step, part) for part in apart]
    except StepFailedError:
        return float("inf")
    return decomposability.relative_error(
        together, gradients, normalized([float(weigh(part)) for part in apart])
    )

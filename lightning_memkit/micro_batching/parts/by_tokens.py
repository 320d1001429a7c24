"""Decide before step 1 whether padded batches may be split by tokens instead of rows, by comparing gradients."""

from functools import partial
from typing import Any

from torch import Tensor

from lightning_memkit.micro_batching import batch_size, normalized
from lightning_memkit.micro_batching.graph.loss_rules import LossRules
from lightning_memkit.micro_batching.parts.partition import Partition
from lightning_memkit.micro_batching.parts.token_parts import TokenPart, extent_of, take_part, wide_tensors
from lightning_memkit.micro_batching.proof.comparison import SCALE, Comparison, Miss, spans_of
from lightning_memkit.micro_batching.proof.optimizer_trial import optimizer_state
from lightning_memkit.micro_batching.proof.trial_values import StepFailedError
from lightning_memkit.micro_batching.proof.trials import Trials
from lightning_memkit.micro_batching.proof.without_noise import LEVELS, quiet
from lightning_memkit.micro_batching.ranks.agreement import any_rank, largest_of_ranks
from lightning_memkit.micro_batching.run import Step
from lightning_memkit.micro_batching.shares.foreseen import UnforeseenLossError
from lightning_memkit.utilities.generators import another_seed
from lightning_memkit.utilities.tensors import tensors_of

_MISSED = Miss(excess=float("inf"), relative_error=float("inf"))


def form_by_tokens(
    step: Step,
    trials: Trials,
    partition: Partition,
    usable_bytes: int,
    resumed: tuple[int, frozenset[str]] | None = None,
) -> None:
    """Let a partition form micro-batches by tokens, where that saves something, is exact, and was measured to fit.

    Exact: the gradient of a short and a long row together equals that of both apart, the short one without padding.
    A module that looks at padding (no mask in its attention, positions counted from the right) fails this, and its
    batches are split by rows. Padding is dropped from those tensors only that are as wide as the mask here.

    Args:
        step: the first step.
        trials: run forwards and backwards that leave no trace.
        partition: the partition to change.
        usable_bytes: a micro-batch by tokens must fit into these.
        resumed: the row length and the wide tensors of the run that is resumed: taken without a comparison, if they
            fit.
    """
    if partition.whole or partition.combination.summed or partition.split is not None:
        return
    if resumed is not None:
        partition.form_by_tokens(*resumed)
        _keep_where_it_fits(step, trials, partition, usable_bytes)
        return
    row_tokens = _columns(step.run.worst_batch(step.batch, 1)) or _columns(step.batch)
    if row_tokens is None or partition.micro_batch_size >= batch_size(step.batch):
        return
    if step.run.meets_in_every_micro_batch:
        return
    wide = wide_tensors(step.batch)
    partition.form_by_tokens(row_tokens, wide)
    useful = partition.cut(step.batch).places is not None
    partition.form_by_rows()
    if not any_rank(step.run, useful):
        return
    miss = _miss(step, trials, partition)
    if largest_of_ranks(step.run, [miss.excess])[0] > 1:
        step.run.info(
            "MemoryBudget splits by rows: without their padding, short rows' gradient differs by "
            f"{miss.relative_error:.1%}, so the module looks at padding."
        )
        return
    partition.form_by_tokens(row_tokens, wide)
    _keep_where_it_fits(step, trials, partition, usable_bytes)


def _keep_where_it_fits(step: Step, trials: Trials, partition: Partition, usable_bytes: int) -> None:
    largest = max(partition.cut(step.batch).parts, key=batch_size)
    resident = list(tensors_of(step.batch))
    with optimizer_state(step) as (states, _):
        peak = trials.peak_of(step, largest, [*states, *resident], usable_bytes)
    if any_rank(step.run, peak is None or peak > usable_bytes):
        partition.form_by_rows()


def _columns(batch: Any) -> int | None:
    extent = extent_of(batch)
    return None if extent is None else extent.columns


def _miss(step: Step, trials: Trials, partition: Partition) -> Miss:
    """How far the gradients of the shortest and longest row, apart and without padding, miss those of both as one."""
    combination = partition.combination
    extent = extent_of(step.batch)
    if extent is None:
        return _MISSED
    lengths = extent.lengths
    rows = sorted({lengths.index(min(lengths)), lengths.index(max(lengths))})
    if len(rows) < 2:
        return _MISSED
    both = take_part(step.batch, TokenPart(rows=tuple(rows), start=0, stop=extent.columns), partition.wide)
    places = [
        TokenPart(rows=(row,), start=int(extent.first[row]), stop=int(extent.stop[row])) for row in rows
    ]
    apart = [take_part(step.batch, place, partition.wide) for place in places]
    module = step.run.module
    miss = _MISSED
    try:
        for level in LEVELS:
            with quiet(module, level):
                together = trials.gradient_of(step, both)
                again = trials.gradient_of(step, both, look=lambda loss: loss * SCALE) / SCALE
                counts: list[float] = []
                note = partial(_noted, combination.rules, counts)
                gradients = [trials.gradient_of(step, part, look=note) for part in apart]
                comparison = Comparison(spans_of(module), together, again)
                if combination.rules is None:
                    counts = [float(combination.weigh(part)) for part in apart]
                miss = comparison.miss(gradients, normalized(counts))
                # Ranks decide together whether to try the next level: one that stopped alone would let others wait.
                random = comparison.differs(trials.gradient_of(step, both, seed=another_seed()))
            if not any_rank(step.run, miss.excess > 1 and random):
                break
    except (StepFailedError, UnforeseenLossError):
        return _MISSED
    return miss


def _noted(rules: LossRules | None, counts: list[float], loss: Tensor) -> Tensor:
    if rules is not None:
        counted = rules.counts(rules.reading_of(loss), loss)
        counts.append(counted[rules.means[0]] if rules.means else 1.0)
    return loss

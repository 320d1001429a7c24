"""What the next attempt at a batch has to know, where the first has shown that its totals were not foretold."""

from lightning_memkit.micro_batching.parts.partition import Partition
from lightning_memkit.micro_batching.run import Step
from lightning_memkit.micro_batching.shares.foreseen import (
    ForeseenElsewhereError,
    ForeseenWronglyError,
    LoneCountError,
    MistakenTotalsError,
    NothingCountedError,
    WholeSkippedError,
)
from lightning_memkit.micro_batching.sizes.window import AccumulationWindow


def is_only_repeated(
    step: Step, error: ForeseenWronglyError, partition: Partition, window: AccumulationWindow
) -> bool:
    """Let the next attempt skip the batch, or read the totals that this one lacked; False where more is needed."""
    if isinstance(error, WholeSkippedError):
        partition.skip_batch()
        return True
    if isinstance(error, NothingCountedError):
        partition.survey_batch(step.batch_idx)
        return True
    if isinstance(error, LoneCountError):
        # If it ends an accumulation window, the batches before it run again, too.
        before = max(step.run.batches_a_step, window.loader_batches) - 1
        partition.look_up_in(range(step.batch_idx - before, step.batch_idx + 1))
        # With a divisor that is no count, the reported loss is no mean of the micro-batches' losses.
        partition.note_values(in_window=window.loader_batches > 1)
        return True
    # A wrong prediction is forgotten already, so the next attempt reads totals itself.
    return isinstance(error, (ForeseenElsewhereError, MistakenTotalsError))

"""What a batch that failed tells: look again at what its micro-batches have changed; note what its loss had."""

import warnings
from dataclasses import replace

from lightning_memkit.micro_batching import batch_size
from lightning_memkit.micro_batching.changes.step_changes import StepChange
from lightning_memkit.micro_batching.proof import verdicts
from lightning_memkit.micro_batching.proof.probe import Weighing
from lightning_memkit.micro_batching.proof.trials import Trials
from lightning_memkit.micro_batching.ranks.agreement import any_rank, largest_of_ranks
from lightning_memkit.micro_batching.run import Step
from lightning_memkit.micro_batching.shares.foreseen import (
    ForeseenWronglyError,
    NewFunctionsError,
    StateChangedError,
    UnforeseenLossError,
)


def look_again(
    step: Step, error: StateChangedError, weighing: Weighing, trials: Trials, micro_batch_size: int
) -> None:
    """Judge what the batch's micro-batches have changed, from trials of all its rows, or of as many as fit.

    If trials see the change, it composes or the loss is refused; if they don't, it is refused, too.

    Args:
        step: the batch's step, whose state before it is restored.
        error: names the changes on this rank.
        weighing: what is proven of the loss.
        trials: run steps without a trace.
        micro_batch_size: the rows of a trial if all rows run out of memory.
    """
    watch, run = trials.watch, step.run
    if any_rank(run, bool(error.names) and error.names <= watch.looked_at):
        _refuse(weighing, error.names)
        return
    known = watch.known - error.names
    total = int(largest_of_ranks(run, [batch_size(step.batch)])[0])
    for rows in sorted({total, min(total, max(micro_batch_size, 2))}, reverse=True):
        watch.known = set(known)
        trials.forget(error.names)
        if weighing.state is not None:
            weighing.state.forget(error.names)
        weighing.again(step, trials, rows)
        unseen = error.names - watch.known
        refused = weighing.verdict is not None and not weighing.verdict.adds_up
        if refused or not any_rank(run, bool(unseen)):
            break
    watch.known |= known
    watch.accept(error.names)
    verdict = weighing.verdict
    if refused and verdict is not None and error.names and not any(n in verdict.cause for n in error.names):
        # A queue that is full after one step is no change of the next: it hands values on, which have no name.
        _refuse(weighing, error.names)
    if refused or not any_rank(run, bool(unseen)):
        return
    hooks = run.hooks_by_micro_batch()
    if hooks or not trials.ranks.compares:
        by = f"{', '.join(hooks[:3])}, or training_step," if hooks else "training_step"
        warnings.warn(
            f"{by} changes {', '.join(sorted(unseen)) or 'state on another rank'} in every micro-batch: once in each, "
            "not once a step. Change it in on_train_batch_end, or keep the batch whole (micro_batch_size = the "
            "loader's batch size).",
            stacklevel=2,
        )
        return
    _refuse(weighing, unseen)


def _refuse(weighing: Weighing, names: frozenset[str]) -> None:
    changes = [StepChange(kind="attribute", name=name) for name in sorted(names)]
    weighing.refuse(verdicts.changes_in_parts(changes))


def note_loss(error: ForeseenWronglyError, weighing: Weighing) -> None:
    """Take from an unforeseen loss what the rows that are compared next may not show."""
    if isinstance(error, NewFunctionsError):
        weighing.head |= error.edges  # ask once
    elif isinstance(error, UnforeseenLossError) and error.name and weighing.rules is not None:
        weighing.rules = replace(weighing.rules, apart=error.name)

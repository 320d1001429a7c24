"""Modules that learn their shapes from a first batch, in trials before it."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_memkit.micro_batching import split_batch
from lightning_memkit.micro_batching.proof.some_rows import count_of_rows
from lightning_memkit.micro_batching.proof.trials import Trials
from lightning_memkit.micro_batching.run import Step


@contextmanager
def materialized(step: Step, trials: Trials) -> Iterator[None]:
    """Within it lazy modules have the shapes that a forward of some rows gives them; then they are lazy again.

    So the first step draws their weights itself, from the random numbers that it has without trials. Costs a
    forward, and nothing where no module is lazy.
    """
    rollback = trials.kept(step)
    lazy = rollback.uninitialized()
    if not lazy:
        yield
        return
    rows = count_of_rows(step.batch)
    some = split_batch(step.batch, [2, rows - 2])[0] if rows > 2 else step.batch
    try:
        with step.run.logging_held(), step.run.loggers_silent(), rollback.watching():
            step.forward(step.run.transfer(some))
        rollback.restore(but=lazy)
        yield
    finally:
        rollback.restore()

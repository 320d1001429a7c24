"""Give lazy modules their shapes for the trials before the first step."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_memkit.micro_batching import split_batch
from lightning_memkit.micro_batching.proof.some_rows import count_of_rows
from lightning_memkit.micro_batching.proof.trials import Trials
from lightning_memkit.micro_batching.run import Step


@contextmanager
def materialized(step: Step, trials: Trials) -> Iterator[None]:
    """A context in which lazy modules have the shapes of a forward of some rows; then they are lazy again.

    So the first step initializes their weights itself, from the same random numbers as without trials. Costs
    one forward if a module is lazy, else nothing.
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
            trials.watch.known |= rollback.touched()  # the first step does so again, after the trials
        rollback.restore(but=lazy)
        yield
    finally:
        rollback.restore()

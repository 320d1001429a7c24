"""What happens once a batch, however many micro-batches it has: hooks on complete gradients, values of metrics."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_memkit.micro_batching.parts.batch_metrics import BatchMetrics
from lightning_memkit.micro_batching.parts.complete_gradients import CompleteGradients
from lightning_memkit.micro_batching.run import Run


class OnceABatch:
    """Puts off what may not happen in each micro-batch, or would see one alone, until the last has run.

    Args:
        run: the loop.
    """

    def __init__(self, run: Run) -> None:
        self._complete = CompleteGradients(run.module, run.world_size)
        self._metrics = BatchMetrics(run.module)

    @contextmanager
    def held(self, *, several: bool) -> Iterator[Callable[[], None]]:
        """A context for a batch's micro-batches; yields what is to be called after the last one."""
        if not several:
            yield lambda: None
            return
        with self._complete.held() as run_hooks, self._metrics.watched() as set_values:

            def finish() -> None:
                set_values()
                run_hooks()

            yield finish

    def begin_part(self, *, counts: bool) -> None:
        """Say that a micro-batch begins, or a run of rows that does not count in the step."""
        self._metrics.begin_part(counts=counts)

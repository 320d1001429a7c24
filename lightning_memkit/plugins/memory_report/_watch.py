"""Choose the training batches that are watched for leaks, tensors that are never released."""

from collections.abc import Collection

from lightning.pytorch import LightningModule, Trainer

from lightning_memkit.memory.findings import Finding
from lightning_memkit.memory.leaks import LeakWatch
from lightning_memkit.memory.origins import Place
from lightning_memkit.optim.state_home import tensors_of
from lightning_memkit.plugins.asked import BatchBudget

_LEAST_STEPS = 4  # with growth; growth in fewer steps may be a cache that fills


class StepsWatch:
    """Enters a `LeakWatch` for the first training batches, and reports once.

    Under MemoryBudget it waits until sizes are settled: they are chosen by timing, which a watch would
    distort.

    Args:
        steps: how many batches to watch; 0 for none.
        outer: lines of the stack above the step, which are not the user's code within it.
    """

    def __init__(self, steps: int, outer: Collection[Place] = ()) -> None:
        self._left = steps
        self._watch = LeakWatch(outer=outer) if steps else None
        self._entered = False

    @staticmethod
    def check(steps: int) -> None:
        """Refuse a number of steps in which no leak can be found.

        Raises:
            ValueError: with the value, the rule and the remedy.
        """
        if steps != 0 and steps < _LEAST_STEPS:
            raise ValueError(
                f"watched_steps={steps} shows no growth: it is 0 (no watch) or at least {_LEAST_STEPS}; 5 is usual."
            )

    @property
    def is_complete(self) -> bool:
        """Whether all batches have been watched but `findings` has not been called."""
        return self._watch is not None and self._left == 0

    def enter(self, budget: BatchBudget | None, batches: int) -> None:
        """Watch the batch that begins, if it is to be watched."""
        if self._watch is None or self._entered or self._left == 0 or _is_settling(budget, batches):
            return
        self._watch.__enter__()
        self._entered = True

    def leave(self) -> None:
        """Count a batch that has ended without an error."""
        if self._watch is not None and self._entered:
            self.drop()
            self._watch.steps += 1
            self._left -= 1

    def drop(self) -> None:
        """Stop watching without counting: for batches that failed or were skipped."""
        if self._watch is not None and self._entered:
            self._entered = False
            self._watch.__exit__(None, None, None)

    def findings(self, trainer: Trainer, module: LightningModule) -> tuple[Finding, ...]:
        """The leaks found in the watched batches; can be called once."""
        watch, self._watch = self._watch, None
        if watch is None:
            return ()
        states = [
            tensor
            for optimizer in trainer.optimizers
            for state in optimizer.state.values()
            for tensor in tensors_of(state)
        ]
        found = tuple(watch.findings(module, states, least_steps=_LEAST_STEPS))
        watch.forget()
        return found


def _is_settling(budget: BatchBudget | None, batches: int) -> bool:
    if budget is None:
        return False
    return batches == 0 or budget.is_tuning

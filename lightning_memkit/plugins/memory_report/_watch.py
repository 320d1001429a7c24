"""Which training batches are watched for tensors that are never let go."""

from collections.abc import Collection

from lightning.pytorch import LightningModule, Trainer

from lightning_memkit.memory.findings import Finding
from lightning_memkit.memory.leaks import LeakWatch
from lightning_memkit.memory.origins import Place
from lightning_memkit.optim.state_home import tensors_of
from lightning_memkit.plugins.asked import BatchBudget

_LEAST_STEPS = 4  # that each leave something behind: fewer may be a cache that fills


class StepsWatch:
    """Enters a `LeakWatch` for the first training batches, and judges once.

    Under MemoryBudget it waits until sizes are settled: sizes are chosen by the clock, which a watch would slow down.

    Args:
        steps: how many batches; 0 for none.
        outer: lines that are not the user's code within a step.
    """

    def __init__(self, steps: int, outer: Collection[Place] = ()) -> None:
        self._left = steps
        self._watch = LeakWatch(outer=outer) if steps else None
        self._entered = False

    @staticmethod
    def check(steps: int) -> None:
        """Refuse a number of steps that can find nothing.

        Raises:
            ValueError: with the value, the rule and the remedy.
        """
        if steps != 0 and steps < _LEAST_STEPS:
            raise ValueError(
                f"watched_steps={steps} shows no growth: it is 0 (no watch) or at least {_LEAST_STEPS}; 5 is usual."
            )

    @property
    def is_complete(self) -> bool:
        """Whether all batches have been watched, and not judged yet."""
        return self._watch is not None and self._left == 0

    def enter(self, budget: BatchBudget | None, batches: int) -> None:
        """Watch the batch that begins, if it is one to watch."""
        if self._watch is None or self._entered or self._left == 0 or _is_settling(budget, batches):
            return
        self._watch.__enter__()
        self._entered = True

    def leave(self) -> None:
        """The batch has ended as it should."""
        if self._watch is not None and self._entered:
            self.drop()
            self._watch.steps += 1
            self._left -= 1

    def drop(self) -> None:
        """A batch that failed or was skipped must not leave its watch active."""
        if self._watch is not None and self._entered:
            self._entered = False
            self._watch.__exit__(None, None, None)

    def findings(self, trainer: Trainer, module: LightningModule) -> tuple[Finding, ...]:
        """What leaks, by what was watched; once."""
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

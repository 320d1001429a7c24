"""Let the optimizer's own step survive an OOM, whichever optimizer takes it: the user may exchange it in a run."""

import warnings
from typing import Any
from weakref import ref

from lightning_memkit.micro_batching.ranks.agreement import local_optimizer
from lightning_memkit.micro_batching.recovery import Recovery
from lightning_memkit.micro_batching.run import Step
from lightning_memkit.optim.bundling import BUNDLE_BYTES, BUNDLE_BYTES_CPU
from lightning_memkit.optim.journal import journal_steps
from lightning_memkit.utilities.patching import Undo


class Journaling:
    """Journals the steps of the optimizer of a run; of an optimizer that can't be journaled, no step is retried.

    Args:
        recovery: retries steps, and is told when the optimizer begins its own; without retries nothing is journaled.
        most_bytes: of the copies that a step keeps at a time.
    """

    def __init__(self, recovery: Recovery, most_bytes: int) -> None:
        self._recovery, self._most_bytes = recovery, most_bytes
        self._wanted = recovery.retries
        self._optimizer: Any = None  # a weak reference, also to an optimizer that can't be journaled
        self._undo: Undo | None = None

    def follow(self, step: Step) -> None:
        """Call before each step: journals its optimizer if it is another one than before."""
        optimizer = local_optimizer(step.optimizer)
        if not self._wanted or (self._optimizer is not None and self._optimizer() is optimizer):
            return
        self.undo()
        self._optimizer = ref(optimizer)
        largest = BUNDLE_BYTES_CPU if step.run.device.type == "cpu" else BUNDLE_BYTES
        try:
            journal = journal_steps(
                optimizer,
                ready=self._recovery.optimizer_steps,
                bundle_bytes=max(1, min(largest, self._most_bytes)),
            )
        except (TypeError, ValueError) as error:
            warnings.warn(f"MemoryBudget can't retry steps that run out of memory: {error}", stacklevel=2)
            self._recovery.retries = False
        else:
            self._recovery.retries = True
            self._undo = journal.undo

    def undo(self) -> None:
        """Restore the optimizer's own step, if it still exists."""
        if self._undo is not None:
            self._undo()
        self._undo = self._optimizer = None

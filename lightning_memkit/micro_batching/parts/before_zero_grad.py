"""Hooks before gradients are zeroed: they run after the first micro-batch's forward, and before the others'."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_memkit.micro_batching.changes.read_watch import ReadWatch
from lightning_memkit.micro_batching.changes.step_watch import StepWatch
from lightning_memkit.micro_batching.run import Run, Step
from lightning_memkit.micro_batching.shares.foreseen import HookStateError


class BeforeZeroGrad:
    """Zeroes gradients between micro-batches, and refuses a hook that changes what later micro-batches read.

    The whole batch's forward would run before the hook. An average of weights that only evaluation reads is as
    well updated then as later. Whether the step reads it, is found out in the 1st, 2nd, 4th, 8th ... step that
    changes it, by watching the second micro-batch's forward.

    Args:
        run: the loop.
        watch: knows what the step has changed so far.
    """

    def __init__(self, run: Run, watch: StepWatch) -> None:
        self._run, self._watch = run, watch
        self._hooks: list[str] = []
        self._names = frozenset[str]()
        self._steps: dict[str, int] = {}

    def zero(self, step: Step, *, several: bool) -> None:
        """Zero gradients after the first of several micro-batches."""
        self._names = frozenset()
        self._hooks = self._run.hooks_before_zero_grad() if several and step.starts_window else []
        if not self._hooks:
            step.zero_grad()
            return
        before = self._watch.touched()
        step.zero_grad()
        changed = self._watch.touched() - before
        self._watch.passes_over(changed)
        for name in changed:
            self._steps[name] = self._steps.get(name, 0) + 1
        self._names = frozenset(name for name in changed if self._steps[name].bit_count() == 1)

    @contextmanager
    def next_forward(self) -> Iterator[None]:
        """Encloses the forward of another micro-batch.

        Raises:
            HookStateError: it has read what the hook has changed.
        """
        names, self._names = self._names, frozenset()
        if not names:
            yield
            return
        reads = ReadWatch(self._run.module, names, self._watch.tensors(names))
        with reads.watching():
            yield
        if reads.read:
            shown = ", ".join(sorted(names)[:5])
            raise HookStateError(f"{', '.join(self._hooks[:3])} changes {shown}, which training_step reads")

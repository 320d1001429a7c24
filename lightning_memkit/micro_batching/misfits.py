"""Batches in the midst of a run whose structure can't be split: each runs whole, the others go on in micro-batches."""

import warnings

from lightning_memkit.micro_batching import SplitError, batch_size
from lightning_memkit.micro_batching.parts.partition import Partition
from lightning_memkit.micro_batching.ranks.agreement import any_rank
from lightning_memkit.micro_batching.run import Step
from lightning_memkit.micro_batching.sizes.known import KnownSizes
from lightning_memkit.utilities.tensors import tensors_of


def warn_of_all(error: SplitError, size: int | str) -> None:
    """Warn that all batches run whole, since the first one can't be split."""
    given = "" if size == "auto" else f", not in micro-batches of {size}"
    warnings.warn(f"MemoryBudget runs batches whole{given}: {error}", stacklevel=2)


class Misfits:
    """Finds batches that can't be split, warns of the first, and measures those larger than all before.

    Args:
        partition: told of each batch whether it can be split.
        known: measures a whole batch.
    """

    def __init__(self, partition: Partition, known: KnownSizes) -> None:
        self._partition, self._known = partition, known
        self._has_warned = False
        self._measured_bytes = 0

    def are_in(self, step: Step, *, micro_batches: int) -> bool:
        """Whether this batch, or another rank's, can't be split; then no rank probes it.

        Args:
            step: the batch's step.
            micro_batches: in how many the batches are split that can be.

        Raises:
            BudgetError: the batch does not fit as a whole.
        """
        misfit = ""
        try:
            batch_size(step.batch)
        except SplitError as error:
            misfit = str(error)
        self._partition.fit(misfit)
        if not any_rank(step.run, bool(misfit)):
            return False
        if misfit and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"MemoryBudget runs batch {step.batch_idx} whole, as any other like it: {misfit}",
                stacklevel=2,
            )
        held_bytes = sum(tensor.nbytes for tensor in tensors_of(step.batch)) if misfit else 0
        if any_rank(step.run, held_bytes > self._measured_bytes):
            self._measured_bytes = max(self._measured_bytes, held_bytes)
            self._known.whole(step, why=misfit)
            step.run.set_gradient_parts(micro_batches)  # measuring has set it to that of a whole batch
        return True

    def why_unprobed(self, step: Step) -> str:
        """Why this batch can be probed on no rank, as one rank's can't be split; empty where all ranks' can."""
        own = self._partition.misfit
        elsewhere = "Another rank's batch can't be split (see its warning), so that this one runs whole, too."
        return (own or elsewhere) if any_rank(step.run, bool(own)) else ""

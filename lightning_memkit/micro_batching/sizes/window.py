"""Accumulate several loader batches into one optimizer step, to reach an `effective_batch_size`."""

from lightning_memkit.micro_batching.graph.loss_rules import LossRules
from lightning_memkit.micro_batching.run import Run
from lightning_memkit.micro_batching.sizes.sizing import BudgetError


class AccumulationWindow:
    """The loader batches that make one optimizer step: several if the effective batch is larger than one."""

    def __init__(self, effective_batch_size: int | None) -> None:
        self.effective_batch_size = effective_batch_size
        self.loader_batches = 1
        self._run: Run | None = None
        self._before = 1

    def open_early(self, run: Run) -> None:
        """Open before schedulers ask for the number of steps, if the data source names its batch size."""
        if run.loader_batch_size is not None:
            self.open(run, run.loader_batch_size)

    def open(self, run: Run, loader_batch: int) -> None:
        """Let the loop accumulate as many loader batches as the effective batch holds.

        Raises:
            ValueError: the effective batch is not a multiple of the loader's, or the first batch has another
                size than the data source named.
        """
        wanted = self.effective_batch_size
        if wanted is None:
            return
        if self._run is not None:
            if run.steps_taken == 0 and loader_batch * self.loader_batches != wanted:
                raise ValueError(
                    f"effective_batch_size={wanted} counts on {self.loader_batches} loader batches of "
                    f"{wanted // self.loader_batches}, by the `batch_size` that the data source names; the first "
                    f"batch holds {loader_batch}. Let the source's batch_size be that of its loader."
                )
            return
        if wanted % loader_batch:
            raise ValueError(
                f"effective_batch_size={wanted} is not a multiple of the loader's batch of {loader_batch}; "
                f"write {max(1, wanted // loader_batch) * loader_batch}, or change the loader's batch_size."
            )
        self._run, self._before = run, run.batches_a_step
        self.loader_batches = run.batches_a_step = wanted // loader_batch

    def check(self, rules: LossRules | None, *, is_unlike: bool) -> None:
        """Refuse to weigh several batches as one if the terms of the loss have different shares.

        Raises:
            BudgetError: the totals of such terms are known only at the window's end, when their gradients are
                accumulated already.
        """
        batches = self.loader_batches
        if batches < 2 or rules is None or not (is_unlike or rules.needs_totals):
            return
        raise BudgetError(
            f"effective_batch_size={self.effective_batch_size} weighs {batches} loader batches as one, and "
            "the loss has terms that divide by unlike counts: what each counts in all of them is not known before "
            f"the last one. Let the loader's batches be of {self.effective_batch_size} (they are split to "
            f"fit), or write Trainer(accumulate_grad_batches={batches}) instead, where each batch is its own mean."
        )

    def close(self) -> None:
        """Restore the loop's own setting."""
        if self._run is not None:
            self._run.batches_a_step = self._before
            self._run = None

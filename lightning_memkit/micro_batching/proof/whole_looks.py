"""Run a whole batch forward, without a trace, to see whether it has a loss, which, and what that counts."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_memkit.memory.meter import unmetered
from lightning_memkit.micro_batching.graph.term_values import TermValues, weighed_value
from lightning_memkit.micro_batching.parts.cut import Cut
from lightning_memkit.micro_batching.parts.partition import Partition
from lightning_memkit.micro_batching.parts.skipped_parts import Weigh, WholeLook
from lightning_memkit.micro_batching.proof.trials import Trials
from lightning_memkit.micro_batching.proof.without_noise import quiet
from lightning_memkit.micro_batching.run import Run, Step
from lightning_memkit.micro_batching.shares.divisors import least_divisors
from lightning_memkit.micro_batching.shares.foreseen import UnforeseenLossError, WholeTermsError
from lightning_memkit.micro_batching.shares.lone_counts import saving_shapes_only
from lightning_memkit.utilities.generators import Generators


class WholeLooks:
    """Forwards of whole batches, for which autograd saves only shapes.

    Args:
        run: the loop.
        trials: runs them without a trace.
    """

    def __init__(self, run: Run, trials: Trials) -> None:
        self._run, self._trials = run, trials

    @property
    def has_lost_batch(self) -> bool:
        """Whether the batch at hand is no longer as it was given, and can't be put back."""
        return self._trials.watch.has_lost_batch

    def __call__(self, step: Step, partition: Partition, weigh: Weigh | None = None) -> WholeLook | None:
        """What the whole batch's loss shows; None if it does not fit into memory, or the step fails on it.

        Nor where ranks wait for each other in the step: one on which it fails would leave the others there.

        Args:
            step: the batch's step.
            partition: how its loss comes from those of its micro-batches.
            weigh: gives the weights of its terms, see `WholeLook.weighed`.

        Raises:
            WholeTermsError: it has other terms than were proven to add up.
        """
        combination, draws = partition.combination, self._trials.draws
        if self._trials.ranks.exchanges:
            return None
        with unmetered(), self._trials.no_trace(step, after_backward=True) as logged:
            if combination.state is not None:
                combination.state.begin_part()
            if draws.proven:
                draws.restore()  # the batch draws from Python's and NumPy's generators what its micro-batches drew
            generators = Generators(draws.of_torch)
            saved = nullcontext() if combination.rules is None else saving_shapes_only()
            graph = torch.set_grad_enabled(combination.rules is not None)
            try:
                with self._trials.within_budget(step) or nullcontext(), graph, saved, TermValues() as noted:
                    loss, returned = self._trials.ranks.part(
                        lambda: step.forward(self._run.transfer(step.batch)), counts=False, kind="survey"
                    )
            except Exception as error:
                self._run.debug(f"MemoryBudget can't look at a whole batch: {error!r}")
                return None
            of_rows, elsewhere = generators.drawn_from()
            found = WholeLook(
                loss=None if loss is None else loss.detach(),
                drew=of_rows or (elsewhere and not draws.proven),
                logged=list(logged),
                returned=tree_map_only(Tensor, Tensor.detach, returned),
                left={} if combination.state is None else combination.state.left(),
            )
            if loss is None or combination.rules is None:
                return found
            rules = combination.rules
            try:
                reading = rules.reading_of(loss)
                counts = list(rules.counts(reading, loss, noted.values))
            except UnforeseenLossError as error:
                raise WholeTermsError(str(error)) from None
            least = least_divisors(rules, reading, combination.foretold, step.batch)
            for index in least.lone:
                counts[index] = reading.divisors[index]
            for index, count in least.counts.items():
                counts[index] = count
            weights = None if weigh is None else weigh(reading.divisors)
            weighed = None if weights is None else weighed_value(loss, reading, weights, noted.values)
            return replace(found, counts=counts, weighed=None if weighed is None else weighed[0])

    def with_equal_draws(self, step: Step, partition: Partition, cut: Cut) -> list[Tensor] | None:
        """The losses of the batch and of each micro-batch, where rows draw the same random numbers in both.

        Batch normalization runs in eval mode. None if a forward fails or has no loss, or draws can't be handed out.
        """
        losses, total = list[Tensor](), sum(cut.sizes)
        with unmetered(), quiet(self._run.module, 1) as draws:
            if draws is None:
                return None
            draws.record()
            for index, rows in enumerate([step.batch, *cut.parts]):
                if index:
                    draws.hand_out(sum(cut.sizes[: index - 1]), cut.sizes[index - 1], total)
                loss = self._loss_of(step, partition, rows)
                if loss is None:
                    return None
                losses.append(loss)
        return losses if draws.complete else None

    def _loss_of(self, step: Step, partition: Partition, rows: Any) -> Tensor | None:
        state = partition.combination.state
        with self._trials.no_trace(step, rows, after_backward=True):
            if state is not None:
                state.begin_part()
            try:
                with self._trials.within_budget(step) or nullcontext(), torch.no_grad():
                    loss, _ = step.forward(self._run.transfer(rows))
            except Exception as error:
                self._run.debug(f"MemoryBudget can't look at a whole batch: {error!r}")
                return None
        return None if loss is None else loss.detach()

"""Run validation, test and prediction batches within a budget: whole, or in micro-batches where that is exact."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from lightning_memkit.memory.out_of_memory import free_memory, is_out_of_memory
from lightning_memkit.micro_batching import batch_size
from lightning_memkit.micro_batching.evaluation.comparison import Comparisons
from lightning_memkit.micro_batching.evaluation.predictions import check_predictions
from lightning_memkit.micro_batching.evaluation.ranks import EvaluationRanks
from lightning_memkit.micro_batching.evaluation.runs import EvaluationRuns
from lightning_memkit.micro_batching.evaluation.sizes import (
    BatchExtent,
    EvaluationSizes,
    Loader,
    extent_of,
    remedy,
)
from lightning_memkit.micro_batching.evaluation.state import EvaluationRollback
from lightning_memkit.micro_batching.evaluation.step import EvaluationStep
from lightning_memkit.micro_batching.evaluation.trials import EvaluationTrials
from lightning_memkit.micro_batching.options import BudgetOptions
from lightning_memkit.micro_batching.parts.joining import JoinError
from lightning_memkit.micro_batching.ranks.alone import Ranks
from lightning_memkit.micro_batching.run import Run
from lightning_memkit.micro_batching.sizes.sizing import BudgetError


@dataclass(frozen=True, kw_only=True)
class Observer:
    """Callbacks that report how evaluation goes.

    Args:
        retried: called before a batch is retried after an OOM.
        measured: called with the peak of a step whose bytes were counted.
    """

    retried: Callable[[], None] = lambda: None
    measured: Callable[[int], None] = lambda peak: None


class EvaluationEngine:
    """Runs the batches of evaluation loops whole if they fit, else in the largest micro-batches that do.

    A batch that does not fit is split if its step returns None and a comparison has shown that micro-batches log the
    same values and leave the same state in the module. Otherwise it runs whole, and a warning gives the reason and the
    remedy. Where one row does not fit, modules that take tokens one by one run in chunks of them.

    Price: one forward without gradients before a loader's first batch, a few small ones if that batch does
    not fit, and a metered step for the first batch of each run and whenever samples are larger than any
    before. Under DDP a forward of one row shows whether the step communicates. If it does, ranks process each
    batch together, as they do under sharding, and all of them retry when one fails.

    Args:
        run: the loop, of which evaluation is a part.
        options: the budget.
        observer: is told of retries and peaks.
    """

    def __init__(self, run: Run, options: BudgetOptions, observer: Observer) -> None:
        self._run = run
        self._options = options
        self._observer = observer
        self._ranks = EvaluationRanks(run, recover=options.recover)
        self._trials = EvaluationTrials(run, options.split)
        comparisons = Comparisons(run, options, self._trials)
        self._sizes = EvaluationSizes(run, options, self._trials, comparisons)
        self._runs = EvaluationRuns(run, self._sizes, self._trials, comparisons)
        self._loaders: dict[tuple[str, int], Loader] = {}

    def close(self) -> None:
        """Release the process groups through which ranks agree."""
        self._ranks.close()

    def stays_on_host(self, step: EvaluationStep) -> bool:
        """Measure a loader's first batch; return whether this batch stays on the host, to be split."""
        if step.starts_run:
            for known in self._loaders.values():
                known.pending = True
        known = self._loaders.setdefault((step.hook, step.dataloader_idx), Loader())
        if known.size == 0:
            with self._ranks.batch(counts=False):
                known.ranks = self._ranks.of(lambda: self._trials.communicates(step))
                self._trials.ranks = known.ranks
                known.ranks.begin_step(starts_window=True)
                self._sizes.first_look(step, known, extent_of(step.batch, known.ranks))
        if known.exceeds:
            return True
        return known.limited and not known.unsplittable and extent_of(step.batch, Ranks()).rows > known.size

    def run(self, step: EvaluationStep) -> Any:
        """The output of the batch; after an OOM it is retried in smaller micro-batches."""
        known = self._loaders[step.hook, step.dataloader_idx]
        self._trials.ranks = known.ranks
        with self._ranks.batch(counts=True):
            known.ranks.begin_step(starts_window=True)
            extent = extent_of(step.batch, known.ranks)
            if known.exceeds:
                self._sizes.settle(step, known, extent)
            return self._until_it_fits(step, known, extent)

    def _until_it_fits(self, step: EvaluationStep, known: Loader, extent: BatchExtent) -> Any:
        while True:
            parts = self._parts_of(step, known, extent)
            share = extent.elements / max(1, extent.rows) * -(-extent.rows // parts)
            measure = self._measures(known, extent.rows, share)
            limit = self._options.usable_bytes if measure else self._enforced
            put_back = self._run.keep_results()
            rollback = None
            if measure or self._options.recover or parts > 1:
                rollback = self._trials.rollback(step)
            failure = why = ""
            try:
                output = self._attempt(step, known, parts, limit)
            except JoinError as error:
                why = str(error)
            except (RuntimeError, MemoryError) as error:
                retries = (measure or self._options.recover) and not known.ranks.reason
                if not (retries or known.unsplittable) or not is_out_of_memory(error):
                    raise
                failure = f"{type(error).__name__}: {error}"
            else:
                known.pending, known.measured = False, max(known.measured, share if measure else 0.0)
                check_predictions(step, output, self._run.device, self._options.budget_bytes)
                return output
            # Retry outside `except`: the traceback keeps the failed step's tensors alive.
            put_back()
            self._restore(step, rollback)
            if why:
                self._sizes.run_whole(step, known, extent, why)
            else:
                self._shrink(step, known, extent, parts, failure, measured=measure)

    def _parts_of(self, step: EvaluationStep, known: Loader, extent: BatchExtent) -> int:
        if not extent.rows or known.unsplittable or not known.limited:
            return 1
        wanted = extent.parts_of(known.size)
        if wanted == 1 or not self._sizes.can_split(step, known, extent):
            return 1
        ranks = known.ranks
        fewest = -int(ranks.largest_of([-batch_size(step.batch)])[0]) if ranks.meets else wanted
        if fewest < wanted and ranks.any(ranks.exchanges):
            raise BudgetError(
                f"{step.hook} needs {wanted} micro-batches, and a rank's batch has {fewest} samples: ranks exchange "
                "results in each micro-batch. Let every rank's batches have the same size (drop_last=True)."
            )
        return wanted

    def _measures(self, known: Loader, rows: int, share: float) -> bool:
        """Whether to meter this step: the first of a run (other tensors may be alive), or larger samples."""
        if not rows or known.unsplittable or known.ranks.reason:
            return False
        return known.pending or share > known.measured

    @property
    def _enforced(self) -> int | None:
        """The budget if `enforce="always"` counts every step's bytes on this device; None otherwise."""
        on_cuda = self._run.device.type == "cuda"
        return self._options.budget_bytes if self._options.enforce == "always" and not on_cuda else None

    def _attempt(self, step: EvaluationStep, known: Loader, count: int, limit: int | None) -> Any:
        """Run the batch in `count` micro-batches and return its output; bytes are counted against `limit`."""
        meter = nullcontext() if limit is None else self._trials.meter(step, limit)
        with meter, self._sizes.long_rows.at(step.hook, known.chunk_tokens):
            output = self._runs.whole(step) if count == 1 else self._runs.in_parts(step, known, count)
        if not isinstance(meter, nullcontext):
            self._observer.measured(meter.peak_bytes)
        return output

    def _restore(self, step: EvaluationStep, rollback: EvaluationRollback | None) -> None:
        lost = rollback.restore() if rollback is not None else frozenset()
        if lost:
            names = ", ".join(sorted(f"{path}.{name}".lstrip(".") for path, name in lost))
            warnings.warn(
                f"{step.hook} had changed {names} before it ran out of memory; they keep it.", stacklevel=2
            )
        free_memory()

    def _shrink(
        self,
        step: EvaluationStep,
        known: Loader,
        extent: BatchExtent,
        parts: int,
        failure: str,
        *,
        measured: bool,
    ) -> None:
        """Use smaller micro-batches: measured if the budget was exceeded, halved if the device ran out."""
        self._observer.retried()
        failed = -(-extent.rows // parts)
        if failed == 1:
            if self._sizes.fits_in_chunks(step, known):
                return
            raise torch.OutOfMemoryError(
                f"A micro-batch of 1 sample runs out of memory in {step.hook} ({failure}); no smaller one is "
                "possible. Keep the model in fewer bytes (PureBF16Precision), or shorten the samples."
            )
        ran_whole = bool(known.unsplittable)
        if not self._sizes.can_split(step, known, extent):
            if measured and not ran_whole and self._enforced is None:
                return  # over the budget, but the device may have enough
            raise torch.OutOfMemoryError(
                f"{step.hook} runs out of memory ({failure}) and can't be split: {known.unsplittable}. {remedy(step)}"
            )
        if measured or self._enforced is not None:
            self._sizes.choose(step, known, extent, parts=parts + 1)
        else:
            known.size, known.limited = (failed + 1) // 2, True
        self._run.info(
            f"MemoryBudget: out of memory in {step.hook} with {failed} samples; the batch is retried in micro-batches "
            f"of {known.size} ({failure})"
        )

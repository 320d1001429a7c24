"""Run validation, test and prediction batches within a budget, in parts where they don't fit whole."""

import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_memkit.joining import Counted, JoinError, Joining
from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching import batch_size, split_batch
from lightning_memkit.plugins import _evaluation_state as state
from lightning_memkit.plugins import _seam_evaluation as seam
from lightning_memkit.plugins._evaluation_sizes import (
    EvaluationSizes,
    Loader,
    elements_of,
    rows_of,
)
from lightning_memkit.plugins._evaluation_trials import EvaluationTrials, Outcome, logged_values
from lightning_memkit.plugins._options import BudgetOptions
from lightning_memkit.plugins._predictions import check_predictions
from lightning_memkit.plugins._ranks import largest_of_ranks
from lightning_memkit.plugins._seam import communicates_in_every_part
from lightning_memkit.plugins._sizing import BudgetError


def keep_budget_in_evaluation(trainer: Trainer, options: BudgetOptions) -> Callable[[], None]:
    """Let validation (also within a fit), test and prediction keep a budget; returns the undo.

    A batch that fits runs whole, as Lightning runs it. One that does not runs in parts without gradients, one at
    a time on the device, and what it returns, logs and leaves in its module is what the unsplit batch gives; where
    it can't be, the batch runs whole, with a warning that says why. See `EvaluationParts` for the price.
    """
    return seam.install(trainer, EvaluationParts(trainer, options))


class _RunAgain(Exception):
    """The batch is to run again, with what was learned from it."""


class EvaluationParts:
    """Runs the batches of evaluation loops whole where they fit, else in the largest parts that do.

    Price: one forward without gradients before a loader's first batch, a handful of small ones where the batch does
    not fit, and a metered step for the first batch of each run and where samples are larger than any before.

    Args:
        trainer: the trainer whose loops they are.
        options: the budget.
    """

    def __init__(self, trainer: Trainer, options: BudgetOptions) -> None:
        self.retries = 0
        self._trainer = trainer
        self._options = options
        self._trials = EvaluationTrials(trainer, options.split, options.weigh_by)
        self._sizes = EvaluationSizes(trainer, options, self._trials)
        self._loaders: dict[tuple[str, int], Loader] = {}

    def stays_on_host(self, step: seam.EvaluationStep) -> bool:
        """Look at a loader's first batch; whether the batch is going to be split."""
        if step.starts_run:
            for known in self._loaders.values():
                known.pending = True
        known = self._loaders.setdefault((step.hook, step.dataloader_idx), Loader())
        rows, _ = rows_of(step.batch)
        if known.size == 0:
            self._sizes.first_look(step, known, rows)
        return known.passes or (known.limited and rows > known.size and not known.unsplittable)

    def _parts_of(self, step: seam.EvaluationStep, known: Loader, rows: int) -> int:
        wanted = 1 if known.unsplittable or not known.limited else max(1, -(-rows // known.size))
        if self._others_wait():  # ranks meet in each forward: all run as many
            most, fewest = largest_of_ranks(self._trainer, [wanted, -rows])
            wanted = int(most)
            if wanted > -fewest:
                raise BudgetError(
                    f"{step.hook} needs {wanted} parts, and a rank's batch has {-fewest:.0f} samples. Let every "
                    "rank's batches have the same size (drop_last=True)."
                )
        return wanted if wanted == 1 or self._sizes.can_split(step, known) else 1

    def run(self, step: seam.EvaluationStep) -> Any:
        """The output of the batch; in smaller parts where it runs out of memory."""
        known = self._loaders[step.hook, step.dataloader_idx]
        rows, unclear = rows_of(step.batch)
        if known.passes:
            self._sizes.settle(step, known, rows, unclear)
        while True:
            parts = self._parts_of(step, known, rows) if rows else 1
            share = elements_of(step.batch) / max(1, rows) * -(-rows // parts)
            measure = self._measures(known, rows, share)
            rollback = None
            put_back = seam.keep_results(self._trainer)
            if measure or self._options.recover or parts > 1:
                changing = self._trials.changing
                rollback = state.EvaluationRollback(self._trainer.lightning_module, changing)
            failure = why = ""
            try:
                output = self._attempt(step, known, parts, self._options.usable_bytes if measure else None)
            except _RunAgain:
                pass
            except JoinError as error:
                why = str(error)
            except (RuntimeError, MemoryError) as error:
                retries = measure or self._options.recover
                if not retries or not is_out_of_memory(error) or self._others_wait():
                    raise
                failure = f"{type(error).__name__}: {error}"
            else:
                known.pending, known.measured = False, max(known.measured, share if measure else 0.0)
                check_predictions(step, output, self._options.budget_bytes)
                return output
            # The retry is outside `except`: the traceback holds the failed step's tensors alive.
            put_back()
            self._restore(step, rollback)
            if why:
                self._sizes.run_whole(step, known, why)
            elif failure:
                self._shrink(step, known, parts, failure, by_budget=measure)

    def _measures(self, known: Loader, rows: int, share: float) -> bool:
        """Whether to count this step's bytes: the device holds other things, or the samples are larger."""
        if not rows or known.unsplittable or known.outputs_pass or self._others_wait():
            return False
        return known.pending or share > known.measured

    def _others_wait(self) -> bool:
        return communicates_in_every_part(self._trainer)

    def _attempt(self, step: seam.EvaluationStep, known: Loader, count: int, limit: int | None) -> Any:
        """The batch's output, from that many parts; `limit`: count bytes against it."""
        meter = nullcontext() if limit is None else self._trials.meter(step, limit)
        if count == 1:
            with meter:
                return step.forward(step.whole())
        module, on_host = self._trainer.lightning_module, known.outputs_pass
        parts = split_batch(step.batch, _even(step.batch, count), split=self._options.split)
        watched = known.watched
        first = before = state.snapshot(module, watched)
        outcomes: list[Outcome] = []
        entries: list[dict[str, Any]] = []
        with meter:
            for part in parts:
                with seam.logging_held(self._trainer) as logged:
                    output = step.forward(step.transfer(part))
                output = move_data_to_device(output, torch.device("cpu")) if on_host else output
                after = state.snapshot(module, watched)
                left = state.changes(before, after, watched)
                outcomes.append(Outcome(output=output, logged=logged_values(logged), left=left))
                entries, before = logged, after
        whole = self._joined(step, known, parts, outcomes, watched)
        state.write_back(module, first, whole.left)
        self._log(entries, whole.logged)
        return whole.output

    def _joined(
        self,
        step: seam.EvaluationStep,
        known: Loader,
        parts: list[Any],
        outcomes: list[Outcome],
        watched: frozenset[state.Key],
    ) -> Outcome:
        """The whole batch's outcome; where rules are in doubt, another comparison on this batch settles it."""
        joining = known.joining
        if joining is None:
            raise RuntimeError("MemoryBudget joins parts before it has compared any.")
        counts = self._trials.counts(step.batch, parts)
        try:
            whole = self._join(joining, outcomes, counts)
            while self._trials.any_rank(bool(joining.doubtful)) and self._sizes.settles(step, known):
                if not known.watched <= watched:  # more is changed by parts than was watched in these
                    raise _RunAgain
                whole = self._join(joining, outcomes, counts)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error) and not known.outputs_pass:
                self._sizes.outputs_pass(step, known)
            raise
        return whole

    def _join(self, joining: Joining, outcomes: list[Outcome], counts: dict[str, list[float]]) -> Outcome:
        mismatch, whole = "", outcomes[-1]
        try:
            whole = joining.join(outcomes, counts)
        except JoinError as error:
            mismatch = str(error)
        if self._trials.any_rank(bool(mismatch)):
            raise JoinError(mismatch or "the parts of another rank don't go together")
        return whole

    def _log(self, entries: list[dict[str, Any]], values: dict[str, list[Counted]]) -> None:
        waiting = {name: list(counted) for name, counted in values.items()}
        for entry in entries:
            for counted in waiting.pop(entry["name"], ()):
                # A mean's size is the batch's where the user names none.
                seam.log_now(self._trainer, {**entry, "value": counted.value, "batch_size": counted.count})

    def _restore(self, step: seam.EvaluationStep, rollback: state.EvaluationRollback | None) -> None:
        lost = rollback.restore() if rollback is not None else frozenset()
        if lost:
            names = ", ".join(sorted(f"{path}.{name}".lstrip(".") for path, name in lost))
            warnings.warn(
                f"{step.hook} had changed {names} before it ran out of memory; they keep it.", stacklevel=2
            )
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _shrink(
        self, step: seam.EvaluationStep, known: Loader, parts: int, failure: str, *, by_budget: bool
    ) -> None:
        """Smaller parts: measured anew where the budget was passed, halved where the device ran out."""
        self.retries += 1
        rows, unclear = rows_of(step.batch)
        failed = -(-rows // parts)
        if failed == 1:
            raise torch.OutOfMemoryError(
                f"A part of 1 sample runs out of memory in {step.hook} ({failure}); no smaller one is possible. "
                "Keep the model in fewer bytes (PureBF16Precision), or shorten the samples."
            )
        if not rows or not self._sizes.can_split(step, known):
            reason = unclear or known.unsplittable
            raise torch.OutOfMemoryError(
                f"{step.hook} runs out of memory ({failure}) and can't be split: {reason}"
            )
        if by_budget:
            self._sizes.choose(step, known, -(-rows // (parts + 1)))
        else:
            known.size, known.limited = (failed + 1) // 2, True
        rank_zero_info(
            f"MemoryBudget: out of memory in {step.hook} with {failed} samples; the batch runs again in parts of "
            f"{known.size} ({failure})"
        )


def _even(batch: Any, count: int) -> list[int]:
    """The sizes of that many parts, as even as possible."""
    short, extra = divmod(batch_size(batch), count)
    return [short + 1] * extra + [short] * (count - extra)

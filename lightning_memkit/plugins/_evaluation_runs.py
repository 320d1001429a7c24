"""Run an evaluation batch once: whole, or in parts whose results are joined to the whole's."""

from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer

from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching import batch_size, split_batch
from lightning_memkit.micro_batching.parts.joining import Counted, JoinError, Joining
from lightning_memkit.plugins import _evaluation_state as state
from lightning_memkit.plugins import _seam_evaluation as seam
from lightning_memkit.plugins._evaluation_comparison import Comparisons, Outcome, logged_values
from lightning_memkit.plugins._evaluation_sizes import EvaluationSizes, Loader
from lightning_memkit.plugins._evaluation_trials import EvaluationTrials


class RunAgain(Exception):
    """The batch is to run again, with what was learned from it."""


class EvaluationRuns:
    """Runs batches as often as it is asked to; what they log and leave in their module counts each time.

    Args:
        trainer: the trainer whose loops they are.
        sizes: compares some samples again, where it is in doubt how parts are joined.
        trials: runs the forwards, with other ranks where they meet in them.
        comparisons: counts what parts hold.
    """

    def __init__(
        self, trainer: Trainer, sizes: EvaluationSizes, trials: EvaluationTrials, comparisons: Comparisons
    ) -> None:
        self._trainer = trainer
        self._sizes = sizes
        self._trials = trials
        self._comparisons = comparisons

    def whole(self, step: seam.EvaluationStep) -> Any:
        if self._trainer.world_size == 1:
            return step.forward(step.whole())

        def run() -> tuple[Any, list[dict[str, Any]]]:
            # What is averaged over ranks is so once the batch is done: one that is repeated must not be twice.
            with seam.logging_held(self._trainer) as logged:
                return step.forward(step.whole()), logged

        output, logged = self._trials.part(step, run)
        for entry in logged:
            seam.log_now(self._trainer, entry)
        return output

    def in_parts(self, step: seam.EvaluationStep, known: Loader, count: int) -> Any:
        module, watched = self._trainer.lightning_module, known.watched
        sizes = _even(step.batch, count)
        parts = split_batch(step.batch, sizes, split=self._comparisons.split)
        first = before = state.snapshot(module, watched)
        outcomes: list[Outcome] = []
        entries: list[dict[str, Any]] = []

        def run(part: Any, before: dict[state.Key, Any]) -> tuple[Outcome, Any, Any]:
            with seam.logging_held(self._trainer) as logged:
                output = step.forward(step.transfer(part))
            output = move_data_to_device(output, torch.device("cpu")) if known.outputs_pass else output
            after = state.snapshot(module, watched)
            left = state.changes(before, after, watched)
            return Outcome(output=output, logged=logged_values(logged), left=left), logged, after

        for part in parts:
            outcome, entries, before = self._trials.part(step, partial(run, part, before))
            outcomes.append(outcome)
        for _ in range(count - len(parts)):  # ranks with more samples wait in theirs
            self._trials.repeat(step, parts[0])
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
        counts = self._comparisons.counts(step.batch, parts)
        try:
            whole = self._join(joining, outcomes, counts)
            while known.ranks.any(bool(joining.doubtful)) and self._sizes.settles(step, known):
                # More is changed by parts than was watched in these.
                if known.ranks.any(not known.watched <= watched):
                    raise RunAgain
                whole = self._join(joining, outcomes, counts)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error) and not known.outputs_pass:
                self._sizes.outputs_pass(step, known)
            raise
        return whole

    def _join(self, joining: Joining, outcomes: list[Outcome], counts: dict[str, list[float]]) -> Outcome:
        def run() -> tuple[Outcome, str]:
            try:
                return joining.join(outcomes, counts), ""
            except JoinError as error:
                return outcomes[-1], str(error)

        ranks = self._trials.ranks
        whole, mismatch = ranks.part(run, kind="join", smallest=lambda: None)
        if ranks.any(bool(mismatch)):
            raise JoinError(mismatch or "the parts of another rank don't go together")
        return whole

    def _log(self, entries: list[dict[str, Any]], values: dict[str, list[Counted]]) -> None:
        waiting = {name: list(counted) for name, counted in values.items()}
        for entry in entries:
            for counted in waiting.pop(entry["name"], ()):
                # A mean's size is the batch's where the user names none.
                seam.log_now(self._trainer, {**entry, "value": counted.value, "batch_size": counted.count})


def _even(batch: Any, count: int) -> list[int]:
    """The sizes of that many parts, or of as many as there are samples, as even as possible."""
    rows = batch_size(batch)
    short, extra = divmod(rows, min(rows, count))
    return [short + 1] * extra + [short] * (min(rows, count) - extra)

"""Run an evaluation batch once: whole, or in micro-batches whose logged values are joined."""

from functools import partial
from typing import Any

from lightning_memkit.micro_batching import batch_size, split_batch
from lightning_memkit.micro_batching.evaluation.comparison import (
    ON_ANOTHER_RANK,
    RETURNS,
    Comparisons,
    Counts,
    Entries,
    logged_values,
    told_apart,
)
from lightning_memkit.micro_batching.evaluation.sizes import EvaluationSizes, Loader
from lightning_memkit.micro_batching.evaluation.step import EvaluationStep
from lightning_memkit.micro_batching.evaluation.trials import EvaluationTrials
from lightning_memkit.micro_batching.parts.joining import Counted, JoinError, Joining
from lightning_memkit.micro_batching.run import Run

_MOST_LOOKS = 4  # comparisons of one batch

Logged = dict[str, list[Counted]]


class EvaluationRuns:
    """Runs batches; unlike in trials, each run's logged values and changes to the module are kept.

    Args:
        run: the loop, of which evaluation is a part.
        sizes: compares more samples if it is in doubt how values are joined.
        trials: runs the forwards, together with other ranks if these communicate in them.
        comparisons: counts what micro-batches hold.
    """

    def __init__(
        self, run: Run, sizes: EvaluationSizes, trials: EvaluationTrials, comparisons: Comparisons
    ) -> None:
        self._run = run
        self._sizes = sizes
        self._trials = trials
        self._comparisons = comparisons

    def whole(self, step: EvaluationStep) -> Any:
        """Run the batch whole, as Lightning does, and return its output."""
        if self._run.world_size == 1:
            return step.forward(step.whole())

        def run() -> tuple[Any, Entries]:
            # Rank-averaged values are logged after the batch succeeds, so a retry does not count them twice.
            with self._run.logging_held() as logged:
                return step.forward(step.whole()), logged

        output, logged = self._trials.part(step, run)
        for entry in logged:
            self._run.log_now(entry)
        return output

    def in_parts(self, step: EvaluationStep, known: Loader, count: int) -> None:
        """Run the batch in micro-batches and log the joined values; the step returns nothing.

        Raises:
            JoinError: micro-batches don't reproduce the batch's results, which the comparison of few samples
                had missed.
        """
        parts = split_batch(step.batch, _even(step.batch, count), split=self._comparisons.split)
        counts = self._comparisons.counts(step.batch, parts)
        apart = told_apart(counts)
        if known.ranks.any(not apart <= known.told_apart):  # no comparison has told these rules apart yet
            self._sizes.look(step, known)
            known.told_apart |= apart

        def run(part: Any) -> tuple[Entries, bool]:
            with self._run.logging_held() as entries:
                return entries, step.forward(step.transfer(part)) is not None

        ran = [self._trials.part(step, partial(run, part)) for part in parts]
        for _ in range(count - len(parts)):  # ranks with more samples need its collectives
            self._trials.repeat(step, parts[0])
        if known.ranks.any(any(returned for _, returned in ran)):
            raise JoinError(RETURNS)
        self._log(
            ran[-1][0], self._joined(step, known, parts, [logged_values(one) for one, _ in ran], counts)
        )

    def _joined(
        self, step: EvaluationStep, known: Loader, parts: list[Any], logged: list[Logged], counts: Counts
    ) -> Logged:
        """The whole batch's values; while rules are in doubt, a micro-batch is compared to settle them."""
        if known.rules is None:
            raise RuntimeError("MemoryBudget joins values before it has compared any.")
        for look in range(_MOST_LOOKS + 1):
            values, why = _join(known.rules, logged, counts)
            doubtful = list(known.rules.doubtful)
            if known.ranks.any(bool(why)):
                raise JoinError(why or ON_ANOTHER_RANK)
            if not known.ranks.any(bool(doubtful)):
                return values
            if look < _MOST_LOOKS:
                self._sizes.look(step, known, parts[_unlike(logged, doubtful)[look % len(parts)]])
        raise JoinError(
            f"it is not known how {', '.join(doubtful) or 'a value on another rank'} comes from micro-batches: "
            "several ways agree on all samples that were compared"
        )

    def _log(self, entries: Entries, values: Logged) -> None:
        waiting = {name: list(counted) for name, counted in values.items()}
        for entry in entries:
            for counted in waiting.pop(entry["name"], ()):
                # If the user gave no batch_size, a mean gets the batch's count.
                self._run.log_now({**entry, "value": counted.value, "batch_size": counted.count})


def _join(rules: Joining, parts: list[Logged], counts: Counts) -> tuple[Logged, str]:
    """The joined values, or the reason why they can't be joined."""
    try:
        return rules.join(parts, counts), ""
    except JoinError as error:
        return {}, f"what it logs can't be told from micro-batches: {error}"


def _unlike(logged: list[Logged], doubtful: list[str]) -> list[int]:
    """The indices of micro-batches, those with the most unusual values first (an accuracy that is not 0).

    Rules that agree on a few samples give different values for these.
    """
    values = [
        str([one.value for name in parts if any(name in said for said in doubtful) for one in parts[name]])
        for parts in logged
    ]
    return sorted(range(len(values)), key=lambda place: values.count(values[place]))


def _even(batch: Any, count: int) -> list[int]:
    """The sizes of `count` micro-batches (fewer if there are fewer samples), as equal as possible."""
    rows = batch_size(batch)
    short, extra = divmod(rows, min(rows, count))
    return [short + 1] * extra + [short] * (min(rows, count) - extra)

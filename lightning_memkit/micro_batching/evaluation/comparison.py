"""Decide whether evaluation batches may be split, by comparing some samples whole and in micro-batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from typing import Any

import torch

from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching import (
    SplittableBatch,
    WeighBy,
    batch_size,
    find_labels,
    split_batch,
    weigher,
)
from lightning_memkit.micro_batching.changes.composition import Left, compose
from lightning_memkit.micro_batching.changes.own_objects import is_metric
from lightning_memkit.micro_batching.evaluation.step import EvaluationStep
from lightning_memkit.micro_batching.evaluation.trials import EvaluationTrials
from lightning_memkit.micro_batching.options import BudgetOptions
from lightning_memkit.micro_batching.parts.joining import Counted, JoinError, Joining
from lightning_memkit.micro_batching.parts.logged_entries import counted
from lightning_memkit.micro_batching.proof.decomposability import TOLERANCE
from lightning_memkit.micro_batching.run import Run
from lightning_memkit.utilities.generators import Generators

ON_ANOTHER_RANK = "it differs on another rank (whose own warning says where)"
RETURNS = "what it returns would have to be joined"
_COMPARED_SAMPLES = (5, 2)  # the second is used if the first runs out of memory
_SCANNED_SAMPLES = 256  # to find rows for which the weighing rules differ
_LEAST_APART = 1e-3  # difference of weights; smaller ones hardly change a value

Entries = list[dict[str, Any]]  # the keywords of each call of `self.log`
Pairs = frozenset[tuple[str, str]]  # of weighing rules
Counts = Mapping[str, Sequence[float]]  # by weighing rule: the count of each micro-batch


def logged_values(entries: Entries) -> dict[str, list[Counted]]:
    """The values of collected `self.log` calls, by name."""
    values: dict[str, list[Counted]] = {}
    for entry in entries:
        values.setdefault(entry["name"], []).append(counted(entry))
    return values


@dataclass(frozen=True, kw_only=True)
class _Ran:
    """The results of a few samples that ran whole, or in micro-batches one after the other.

    Attributes:
        logged: the `self.log` calls of each forward.
        left: what the forwards left in the module.
        returned: whether a forward returned something.
        drew: whether a forward drew random numbers.
    """

    logged: list[Entries]
    left: Left
    returned: bool
    drew: bool


class Comparisons:
    """Checks whether micro-batches reproduce a batch's results, and how its logged values follow from theirs.

    Args:
        run: the loop, of which evaluation is a part.
        options: give the user's `split` and `weigh_by`.
        trials: runs steps without a trace.
    """

    def __init__(self, run: Run, options: BudgetOptions, trials: EvaluationTrials) -> None:
        self._run = run
        self.split = options.split
        self._weigh_by = options.weigh_by
        self._trials = trials

    def counts(self, batch: Any, parts: Sequence[Any]) -> dict[str, list[float]]:
        """By weighing rule, each micro-batch's count of what a logged mean may be taken over."""
        own, labels = self._weigh_by, find_labels(batch)
        ways: list[WeighBy] = []
        if isinstance(batch, SplittableBatch):
            ways.append("auto")
        if labels is not None:
            ways.append("labels")
        if labels is not None and labels.ndim > 1:
            ways.append("causal_labels")
        ways.append("samples")
        if own in ways:  # the user's own rule is preferred if several fit
            ways.sort(key=lambda way: way != own)
        counts: dict[str, list[float]] = {}
        if callable(own):
            try:
                counts["weigh_by"] = [float(own(part)) for part in parts]
            except Exception:  # it was written for training batches; these may lack what it counts
                counts.pop("weigh_by", None)
        for way in ways:
            count = weigher(way, batch)
            counts[str(way)] = [float(count(part)) for part in parts]
        return counts

    def rules(self) -> Joining:
        """New rules for joining logged values, with the tolerance of the module's precision."""
        module, precision = self._run.module, self._run.precision
        dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
        coarsest = max((TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16]) for dtype in dtypes), default=2e-3)
        if precision not in ("32-true", "64-true"):
            coarsest = max(coarsest, TOLERANCE[torch.bfloat16])
        # TOLERANCE is for gradients; results round less. In float32 this is tight enough to expose a
        # nonlinear function.
        return Joining(allowed=coarsest / (10 if coarsest > 1e-2 else 100))

    def compare(self, step: EvaluationStep, rules: Joining, part: Any = None) -> Pairs:
        """Run a few samples of the batch whole and in uneven micro-batches; the rules learn from the results.

        Args:
            step: the step whose batch is compared.
            rules: the rules that learn.
            part: a micro-batch to compare completely; if it has only one sample, some samples of the batch
                are compared.

        Returns:
            The pairs of weighing rules that the compared samples tell apart.

        Raises:
            JoinError: micro-batches don't reproduce the results, or can't be compared; the message says why.
        """
        ranks, batch = self._trials.ranks, step.batch if part is None else part
        total, wanted = self._fewest(batch), _COMPARED_SAMPLES
        if part is not None and total > 1:
            wanted = (total, *wanted)
        elif part is not None:
            batch, total = step.batch, self._fewest(step.batch)
        if total < 2:
            raise JoinError("a rank's batch has one sample")
        for rows in sorted({min(samples, total) for samples in wanted}, reverse=True):
            why, failed, ran_out, counts = "", False, False, {}
            try:
                window = self._window(batch, rows)
                parts = split_batch(window, _uneven(rows), split=self.split)
                whole, several = self._both(step, window, parts)
            except Exception as error:  # a user's step may fail in any way on so few rows
                ran_out = is_out_of_memory(error)
                failed = not ran_out
                why = f"it fails on a few samples ({type(error).__name__}: {error})" if failed else ""
            else:
                counts = self.counts(window, parts)
                why = self._difference(rules, whole, several, counts)
            if ranks.any(failed):
                ranks.forget_part()
            if ranks.any(bool(why)):
                raise JoinError(why or ON_ANOTHER_RANK)
            if not ranks.any(ran_out):
                return told_apart(counts)
        raise JoinError("two samples at once run out of memory, so that nothing can be compared")

    def _fewest(self, batch: Any) -> int:
        """The batch's number of samples; with several ranks, the smallest of any rank."""
        return -int(self._trials.ranks.largest_of([-batch_size(batch)])[0])

    def _window(self, batch: Any, rows: int) -> Any:
        """The neighbouring rows for which the weighing rules differ most."""
        total = batch_size(batch)
        if rows == total:
            return batch
        first = min(total, max(rows, _SCANNED_SAMPLES))
        sizes = [1] * first + [total - first] * (total > first)
        single = self.counts(batch, split_batch(batch, sizes, split=self.split))
        ends = [0, *accumulate(_uneven(rows))]

        def apart(start: int) -> float:
            held = {
                way: [sum(counts[start + a : start + b]) for a, b in pairwise(ends)]
                for way, counts in single.items()
            }
            return min(_apart(held).values(), default=0.0)

        start = max(range(first - rows + 1), key=apart)
        sizes = [size for size in (start, rows, total - rows - start) if size > 0]
        return split_batch(batch, sizes, split=self.split)[1 if start else 0]

    def _both(self, step: EvaluationStep, window: Any, parts: Sequence[Any]) -> tuple[_Ran, _Ran]:
        """The results of the samples as a whole, and then as micro-batches from the same state."""
        ran: list[_Ran] = []
        with self._trials.no_trace(step, window, *parts) as rollback:
            for batches in ([window], parts):
                rollback.restore()
                generators, logged, returned = Generators(), list[Entries](), False
                for batch in batches:
                    with self._run.logging_held() as entries:
                        returned |= self._trials.forward(step, batch) is not None
                    logged.append(entries)
                drew, left = any(generators.drawn_from()), rollback.left_behind()
                ran.append(_Ran(logged=logged, left=left, returned=returned, drew=drew))
        return ran[0], ran[1]

    def _difference(self, rules: Joining, whole: _Ran, parts: _Ran, counts: Counts) -> str:
        """What micro-batches would change, or "" if nothing; the rules learn how logged values are joined."""
        if whole.returned or parts.returned:
            return RETURNS
        if whole.drew or parts.drew:
            return "it draws random numbers, and micro-batches draw others"
        shown = [
            entry["name"]
            for entries in whole.logged
            for entry in entries
            if is_metric(entry["value"]) and entry.get("on_step")
        ]
        if shown:
            return f"it logs {shown[0]!r} on_step, a metric that would show its last micro-batch alone"
        try:
            rules.compare(
                logged_values(whole.logged[0]), [logged_values(entries) for entries in parts.logged], counts
            )
        except JoinError as error:
            return f"what it logs can't be told from micro-batches: {error}"
        composed = compose(whole.left, parts.left)
        unlike = {
            str(change): None
            for change in (*whole.left, *parts.left)
            if change not in composed
            or (change.kind != "metric" and not _as_many(whole.left[change], parts.left[change]))
        }
        return f"micro-batches would leave {', '.join(unlike)} otherwise" if unlike else ""


def told_apart(counts: Counts) -> Pairs:
    """The pairs of weighing rules that give the micro-batches different weights."""
    return frozenset(pair for pair, apart in _apart(counts).items() if apart > _LEAST_APART)


def _apart(counts: Counts) -> dict[tuple[str, str], float]:
    """For each pair of weighing rules, the largest difference between a micro-batch's weights."""
    shares = {way: [count / (sum(held) or 1) for count in held] for way, held in counts.items()}
    return {
        (one, other): max(abs(a - b) for a, b in zip(shares[one], shares[other], strict=True))
        for one, other in combinations(shares, 2)
    }


def _as_many(whole: Any, parts: Any) -> bool:
    """Whether lists gained equally many items: metrics can join theirs; others might be used in any way."""
    if isinstance(whole, dict) and isinstance(parts, dict):
        return all(_as_many(value, parts.get(key)) for key, value in whole.items())
    if isinstance(whole, (list, tuple)) and isinstance(parts, (list, tuple)):
        return len(whole) == len(parts) and all(map(_as_many, whole, parts))
    return True


def _uneven(rows: int) -> list[int]:
    """The micro-batch sizes of a comparison; one is a single row, to expose steps that squeeze it."""
    rest = rows - 1
    return [1, rest] if rest < 2 else [1, rest // 2, rest - rest // 2]

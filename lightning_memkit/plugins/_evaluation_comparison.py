"""May a loader's evaluation batches run in parts? Some samples run whole and in parts, and results are compared."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer

from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching import (
    SplittableBatch,
    WeighBy,
    batch_size,
    find_labels,
    split_batch,
    weigher,
)
from lightning_memkit.micro_batching.options import BudgetOptions
from lightning_memkit.micro_batching.parts.joining import Counted, JoinError, Joining
from lightning_memkit.micro_batching.parts.logged_values import counted
from lightning_memkit.micro_batching.proof.decomposability import TOLERANCE
from lightning_memkit.plugins import _evaluation_state as state
from lightning_memkit.plugins._evaluation_trials import EvaluationTrials
from lightning_memkit.plugins._seam_evaluation import EvaluationStep, logging_held

_ON_ANOTHER_RANK = "it differs on another rank (whose own warning says where)"
_COMPARED_SAMPLES = (5, 2)  # the second where the first runs out of memory
_SCANNED_SAMPLES = 256  # for those that tell the ways of weighing apart


@dataclass(kw_only=True)
class Outcome:
    """What a step on a whole batch or on a part came to.

    Args:
        output: what it returned.
        logged: every value that it logged, by name.
        left: what it left in its module.
    """

    output: Any
    logged: dict[str, list[Counted]]
    left: dict[state.Key, Any]


def logged_values(entries: Sequence[dict[str, Any]]) -> dict[str, list[Counted]]:
    """The values of held calls of `self.log`, by name."""
    values: dict[str, list[Counted]] = {}
    for entry in entries:
        values.setdefault(entry["name"], []).append(counted(entry))
    return values


@dataclass(kw_only=True)
class Comparison:
    """Whether parts give the whole's results.

    Args:
        unsplittable: why they don't; empty where they do.
        unproved: why it is not known.
        left: what steps change in their module.
    """

    unsplittable: str = ""
    unproved: str = ""
    left: frozenset[state.Key] = field(default_factory=frozenset)


class Comparisons:
    """Finds out how a step's results come from those of its batch's parts.

    Args:
        trainer: the trainer, within one of its evaluation loops.
        options: how the user splits, and what the loss is a mean over.
        trials: runs steps without a trace.
    """

    def __init__(self, trainer: Trainer, options: BudgetOptions, trials: EvaluationTrials) -> None:
        self._trainer = trainer
        self.split = options.split
        self._weigh_by = options.weigh_by
        self._trials = trials

    def counts(self, batch: Any, parts: Sequence[Any]) -> dict[str, list[float]]:
        """What each part holds of everything that a value may be a mean over."""
        own, labels = self._weigh_by, find_labels(batch)
        ways: list[WeighBy] = []
        if isinstance(batch, SplittableBatch):
            ways.append("auto")
        if labels is not None:
            ways.append("labels")
        if labels is not None and labels.ndim > 1:
            ways.append("causal_labels")
        ways.append("samples")
        if own in ways:  # what the user says comes first, where several agree
            ways.sort(key=lambda way: way != own)
        counts: dict[str, list[float]] = {}
        if callable(own):
            try:
                counts["weigh_by"] = [float(own(part)) for part in parts]
            except Exception:  # it was written for training's batches; these may lack what it counts
                counts.pop("weigh_by", None)
        for way in ways:
            count = weigher(way, batch)
            counts[str(way)] = [float(count(part)) for part in parts]
        return counts

    def joining(self) -> Joining:
        """Rules that are still to be learned, with the tolerance of the module's precision."""
        module, precision = self._trainer.lightning_module, str(self._trainer.precision_plugin.precision)
        dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
        coarsest = max((TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16]) for dtype in dtypes), default=2e-3)
        if precision not in ("32-true", "64-true"):
            coarsest = max(coarsest, TOLERANCE[torch.bfloat16])
        # Of results, not of gradients: they round less, and in float32 a nonlinear function shows.
        return Joining(allowed=coarsest / (10 if coarsest > 1e-2 else 100))

    def compare(self, step: EvaluationStep, joining: Joining, looks: int) -> Comparison:
        """Run a few samples of the batch whole and in uneven parts; the rules learn from it.

        Args:
            step: the step whose batch it is.
            joining: what learns.
            looks: how many comparisons there were: each looks at another place of the batch.
        """
        total = -int(self._trials.ranks.largest_of([-batch_size(step.batch)])[0])
        for rows in sorted({min(samples, total) for samples in _COMPARED_SAMPLES if total > 1}, reverse=True):
            ran_out, why = False, ""
            window, parts, outcomes, left = None, [], [], frozenset[state.Key]()
            try:
                window = self._window(step.batch, rows, looks)
                parts = split_batch(window, _uneven(rows), split=self.split)
                outcomes, left = self._outcomes(step, window, parts)
            except Exception as error:  # whatever a user's step does with a part that it did not count on
                ran_out = is_out_of_memory(error)
                if not ran_out:
                    why = f"{step.hook} fails on a part of the batch ({type(error).__name__}: {error})"
            if self._trials.ranks.any(bool(why)):
                self._trials.ranks.forget_part()
                return Comparison(unsplittable=why or _ON_ANOTHER_RANK)
            if self._trials.ranks.any(ran_out):
                continue
            return self._verdict(step, joining, window, parts, outcomes, left)
        alone = "a rank's batch has one sample" if total < 2 else "two samples at once run out of memory"
        return Comparison(unproved=alone)

    def _verdict(
        self,
        step: EvaluationStep,
        joining: Joining,
        window: Any,
        parts: Sequence[Any],
        outcomes: Sequence[Outcome],
        left: frozenset[state.Key],
    ) -> Comparison:
        mismatch = ""
        try:
            joining.compare(outcomes[0], outcomes[1:], self.counts(window, parts))
        except JoinError as error:
            mismatch = str(error)
        if not self._trials.ranks.any(bool(mismatch)):
            return Comparison(left=left)
        if self._trials.ranks.any(self._draws(step, window, joining)):
            return Comparison(unproved=f"{step.hook} draws random numbers of its own")
        return Comparison(unsplittable=mismatch or _ON_ANOTHER_RANK)

    def _window(self, batch: Any, rows: int, looks: int) -> Any:
        """Neighbouring rows, where the ways of weighing differ the most; later looks go elsewhere."""
        total = batch_size(batch)
        if rows == total:
            return batch
        places = [0, total - rows, (total - rows) // 2]
        start = places[looks % len(places)]
        if looks % len(places) == 0:
            first = min(total, _SCANNED_SAMPLES)
            sizes = [1] * first + [total - first] * (total > first)
            single = self.counts(batch, split_batch(batch, sizes, split=self.split))
            apart = [_apart(single, place, rows) for place in range(first - rows + 1)]
            start = apart.index(max(apart))
        sizes = [size for size in (start, rows, total - rows - start) if size > 0]
        return split_batch(batch, sizes, split=self.split)[1 if start else 0]

    def _outcomes(
        self, step: EvaluationStep, window: Any, parts: Sequence[Any]
    ) -> tuple[list[Outcome], frozenset[state.Key]]:
        """What the whole and then its parts come to, and what they change in their module."""
        module = self._trainer.lightning_module
        runs: list[list[tuple[Any, Any, dict[Any, Any], dict[Any, Any]]]] = []
        for batches in ([window], parts):
            runs.append([])
            with self._trials.no_trace():
                before = state.snapshot(module)
                for batch in batches:
                    with logging_held(self._trainer) as logged:
                        output = self._trials.forward(step, batch)
                    after = state.snapshot(module)
                    runs[-1].append((output, logged_values(logged), before, after))
                    before = after
        keys = frozenset[state.Key]().union(*(state.changed(run[2], run[3]) for run in [*runs[0], *runs[1]]))
        outcomes = [
            Outcome(output=output, logged=logged, left=state.changes(before, after, keys))
            for output, logged, before, after in [*runs[0], *runs[1]]
        ]
        return outcomes, keys

    def _draws(self, step: EvaluationStep, window: Any, joining: Joining) -> bool:
        """Whether the same samples give other results under another seed."""
        seen: list[Any] = []
        for seed in (1, 2):
            with self._trials.no_trace():
                random.seed(seed)
                np.random.seed(seed)
                torch.manual_seed(seed)
                with logging_held(self._trainer) as logged:
                    seen.append((self._trials.forward(step, window), logged_values(logged)))
        return not joining.alike(*seen)


def _uneven(rows: int) -> list[int]:
    """The parts of a comparison: one of a single row, for steps that take it for none."""
    rest = rows - 1
    return [1, rest] if rest < 2 else [1, rest // 2, rest - rest // 2]


def _apart(single: dict[str, list[float]], start: int, rows: int) -> float:
    """How far the ways of weighing the parts of some rows are from each other."""
    shares: list[list[float]] = []
    for counts in single.values():
        inside = counts[start : start + rows]
        ends = [0, *accumulate(_uneven(rows))]
        held = [sum(inside[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
        shares.append([count / sum(held) if sum(held) else 0.0 for count in held])
    pairs = [(a, b) for index, a in enumerate(shares) for b in shares[index + 1 :]]
    return min((max(abs(x - y) for x, y in zip(a, b, strict=True)) for a, b in pairs), default=0.0)

"""Find out what a loss is a mean over, by comparing gradients of a small batch whole and in uneven parts."""

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memkit import decomposability
from lightning_memkit.decomposability import Verdict
from lightning_memkit.memory.out_of_memory import is_out_of_memory
from lightning_memkit.micro_batching import (
    IGNORED_LABEL,
    LABEL_NAMES,
    WeighBy,
    Weigher,
    batch_size,
    find_labels,
    normalized,
    split_batch,
    weigher,
)
from lightning_memkit.plugins import _seam
from lightning_memkit.plugins._logs import LoggedValues
from lightning_memkit.plugins._parts import Splitter
from lightning_memkit.plugins._ranks import any_rank, largest_of_ranks
from lightning_memkit.plugins._trials import StepFailedError, Trials

_RANDOM_OR_BATCHED = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
_LOGGED = 1e-5  # relative difference of logged values that is rounding; nothing is summed up as in gradients
_PROBED_SAMPLES = (5, 2)  # the second where the first runs out of memory
_PROBED_BATCHES = 3  # the samples of one may be too alike to tell


class Weighing:
    """How parts are weighed: given by the user, or whichever of several ways the gradients agree with.

    Ways that weigh a batch's parts alike can't be told apart by it, and need not be. They stay open until a
    batch weighs differently under them; that batch is probed again.

    Args:
        weigh_by: the user's choice; `"auto"` considers all that a batch may mean.
        split: the user's own splitter.
    """

    def __init__(self, weigh_by: WeighBy | Weigher, split: Splitter | None) -> None:
        self.weigh_by: WeighBy | Weigher = weigh_by
        self.split = split
        self.verdict: Verdict | None = None
        self.logs = LoggedValues()
        self._open: list[WeighBy | Weigher] = []
        self._probes = 0

    @property
    def proven(self) -> bool:
        """Whether the loss added up from its parts in every batch that is probed."""
        return self._probes >= _PROBED_BATCHES and self.verdict is not None and self.verdict.adds_up

    def settle(self, step: _seam.Step, trials: Trials, micro_batch_size: int) -> None:
        """Probe where the batch needs it; afterwards `weigh_by` holds for this batch."""
        if self._probes == 0:
            self._open = _candidates(self.weigh_by, step.batch)
        elif self._probes >= _PROBED_BATCHES and len(self._open) < 2:
            return
        else:
            splits = 1 < micro_batch_size < batch_size(step.batch)
            wanted = splits and self._probes < _PROBED_BATCHES
            wanted = wanted or len(self._open) > 1 and self._open_ways_differ(step.batch, micro_batch_size)
            if not any_rank(step.trainer, wanted):
                return
        # Once a size is chosen, a probe keeps to it: it must not need more memory than training does.
        self._probe(step, trials, micro_batch_size if self._probes else _PROBED_SAMPLES[0])

    def _open_ways_differ(self, batch: Any, micro_batch_size: int) -> bool:
        total = batch_size(batch)
        sizes = [min(micro_batch_size, total)]
        sizes += [1] * (total - sizes[0])
        parts = split_batch(batch, sizes, split=self.split)
        shares = [normalized([float(weigher(way, batch)(part)) for part in parts]) for way in self._open]
        return any(abs(a - b) > 1e-12 for other in shares[1:] for a, b in zip(shares[0], other, strict=True))

    def _probe(self, step: _seam.Step, trials: Trials, most: int) -> None:
        total = batch_size(step.batch)
        self.weigh_by = self._open[0]
        if _seam.communicates_in_every_part(step.trainer):
            self._unproved(
                f"{type(step.trainer.strategy).__name__} averages gradients over ranks in each backward"
            )
            return
        for rows in sorted({min(samples, most, total) for samples in _PROBED_SAMPLES}, reverse=True):
            if rows < 2:
                return
            # Without a probe nothing is known: on the host the smallest may take what it needs.
            trials.limited = rows > _PROBED_SAMPLES[-1]
            try:
                self._compare(step, trials, rows)
                return
            except StepFailedError as error:
                if error.skipped:  # nothing is learned from a batch that the module passes over
                    self._probes += 1
                    return
                if self._probes > 0:  # the batch itself will show what is wrong with it
                    self._probes = _PROBED_BATCHES
                    return
                if is_out_of_memory(error.cause):
                    continue
                if step.trainer.world_size > 1:
                    raise error.cause from None
                # The whole batch may well run: a module may ask for a certain number of samples.
                self._probes = _PROBED_BATCHES
                self.verdict = Verdict(
                    adds_up=False,
                    relative_error=float("inf"),
                    cause=f"training_step fails on a part of the batch ({type(error.cause).__name__}: {error.cause})",
                    remedy="keep the batch whole (micro_batch_size = the loader's batch size), or pass split=",
                )
                return
        self._unproved("two samples at once run out of memory")

    def _unproved(self, reason: str) -> None:
        self._probes, self._open, self.verdict = _PROBED_BATCHES, self._open[:1], None
        if self.weigh_by != "auto" and not callable(self.weigh_by):
            warnings.warn(
                f"MemoryBudget can't check that the loss may be split, since {reason}: it is taken to be a mean over "
                f"{self.weigh_by}. Write weigh_by= to say what it is a mean over.",
                stacklevel=2,
            )

    def _some_rows(self, batch: Any, rows: int) -> Any:
        """That many rows, from another place at each probe."""
        total = batch_size(batch)
        if rows == total:
            return batch
        before = _offset(self._probes, total - rows)
        sizes = [size for size in (before, rows, total - rows - before) if size > 0]
        return split_batch(batch, sizes, split=self.split)[1 if before else 0]

    def _compare(self, step: _seam.Step, trials: Trials, rows: int) -> None:
        small = self._some_rows(step.batch, rows)
        sizes = [rows // 2, rows - rows // 2]
        if len(self._open) > 1:
            small = _told_apart(small, sizes[0], step.batch)
        parts = split_batch(small, sizes, split=self.split)
        module = step.trainer.lightning_module
        exact = str(step.trainer.precision_plugin.precision) in ("32-true", "64-true")
        allowed = decomposability.tolerance(module.parameters(), reduced=not exact)
        verdicts: dict[int, Verdict] = {}
        errors: list[float] = []
        whole, gradients, everything_in_eval = torch.zeros(0), [], False
        logged_by_whole: list[dict[str, Any]] = []
        logged_by_parts: list[list[dict[str, Any]]] = []
        for everything_in_eval in (False, True):
            with deterministic(module, everything=everything_in_eval):
                whole = trials.gradient_of(step, small)
                logged_by_whole, logged_by_parts, gradients = trials.logged, [], []
                for part in parts:
                    gradients.append(trials.gradient_of(step, part))
                    logged_by_parts.append(trials.logged)
            for index, way in enumerate(self._open):
                weights = normalized(
                    [float(weigher(way, small)(part)) for part in parts], summed=way == "sum"
                )
                verdict = decomposability.judge(whole, gradients, weights, allowed)
                if index not in verdicts or verdict.relative_error < verdicts[index].relative_error:
                    verdicts[index] = verdict
            # Ranks see other samples, and must come to one answer.
            errors = largest_of_ranks(
                step.trainer, [verdicts[i].relative_error for i in range(len(self._open))]
            )
            if min(errors) <= allowed:
                break
        if min(errors) > allowed:
            again = trials.gradient_of(step, small, seed=1)
            noise = decomposability.relative_error(whole, [again], [1.0])
            if largest_of_ranks(step.trainer, [noise])[0] > allowed:
                self._unproved("the loss draws random numbers of its own")
                return
        self._probes += 1
        # A clear lead only: ways that differ by rounding stay open, in their order.
        kept = [index for index, error in enumerate(errors) if error <= 3 * min(errors) + allowed / 20]
        self.verdict = verdicts[kept[0]]
        if errors[kept[0]] > allowed and self.verdict.adds_up:
            self.verdict = Verdict(
                adds_up=False,
                relative_error=errors[kept[0]],
                cause="another rank's samples show it (its own message names the cause)",
                remedy="see that rank's message",
            )
        elif self.verdict.adds_up:
            with deterministic(module, everything=everything_in_eval):
                self.verdict = _independent(step, trials, parts, gradients, allowed) or self.verdict
        self._open = [self._open[index] for index in kept]
        self.weigh_by = self._open[0]
        shares = [float(weigher(self.weigh_by, small)(part)) for part in parts]
        rounding = min(allowed, _LOGGED) if exact else allowed
        self.logs.compare(logged_by_whole, logged_by_parts, shares, sizes, rounding)


def _independent(
    step: _seam.Step, trials: Trials, parts: list[Any], gradients: list[Tensor], allowed: float
) -> Verdict | None:
    """None where the second part's gradient is the same after the first as alone, else what to say of it."""
    failure = ""
    try:
        after = trials.gradient_of(step, parts[1], after=parts[0])
        error = decomposability.relative_error(gradients[1], [after], [1.0])
    except StepFailedError as failed:
        if failed.skipped or is_out_of_memory(failed.cause):
            raise
        error, failure = float("inf"), f" ({type(failed.cause).__name__}: {failed.cause})"
    error = largest_of_ranks(step.trainer, [error])[0]
    if error <= allowed:
        return None
    names = ", ".join(trials.handed_on)
    return Verdict(
        adds_up=False,
        relative_error=error,
        cause=f"training_step hands values on to the next one{f', in {names}' if names else ''}: a part would take "
        f"over those of other samples{failure}",
        remedy="keep the batch whole (micro_batch_size = the loader's batch size), or keep them apart by sample",
    )


def _offset(probes: int, free: int) -> int:
    """Where the probed rows begin: at the start, at the end, in the middle."""
    return (0, free, free // 2)[probes % 3]


def _told_apart(small: Any, first: int, batch: Any) -> Any:
    """A copy of a batch whose labels tell the ways of weighing apart, where ignored labels are known to be used.

    A row of the first part keeps two labels: its last, and one at position 0, where losses that shift inside don't
    look; a row of the second keeps its last three. No two ways share alike then, which even bf16 shows.
    Only values that the batch holds are used: another one might be out of the loss's range.
    """
    everywhere, labels = find_labels(batch), find_labels(small)
    if everywhere is None or labels is None or not bool((everywhere == IGNORED_LABEL).any()):
        return small
    real = everywhere[everywhere != IGNORED_LABEL]
    if len(real) == 0:
        return small
    changed = labels.clone()
    if labels.ndim < 2:
        changed[changed == IGNORED_LABEL] = real[0]
        changed[first + 1 :: 2] = IGNORED_LABEL
    elif labels.ndim == 2 and labels.shape[1] > 3:
        changed[:] = IGNORED_LABEL
        for row, kept in enumerate(labels):
            places = (kept[1:] != IGNORED_LABEL).nonzero().flatten().tolist() or [kept.shape[0] - 2]
            chosen = [0, 1 + places[-1]] if row < first else [1 + place for place in places[-3:]]
            for place in chosen:
                changed[row, place] = kept[place] if kept[place] != IGNORED_LABEL else real[0]
    return _with_labels(small, labels, changed)


def _with_labels(batch: Any, labels: Tensor, changed: Tensor) -> Any:
    """A shallow copy of the batch with other labels."""
    if isinstance(batch, Mapping):
        replaced: Any = copy.copy(batch)
        replaced[next(name for name in LABEL_NAMES if name in batch)] = changed
        return replaced
    if isinstance(batch, (tuple, list)):
        items, kind = [*batch[:-1], changed], type(batch)
        return kind(*items) if hasattr(batch, "_fields") else kind(items)
    replaced = copy.copy(batch)
    name = next(name for name in LABEL_NAMES if getattr(batch, name, None) is labels)
    object.__setattr__(replaced, name, changed)
    return replaced


def _candidates(weigh_by: WeighBy | Weigher, batch: Any) -> list[WeighBy | Weigher]:
    """The ways of weighing to compare: the user's alone, or all that a batch may mean, the likeliest first."""
    if weigh_by != "auto" or hasattr(batch, "weight"):
        return [weigh_by]
    labels = find_labels(batch)
    if labels is None:
        return ["samples"]
    return ["labels", "samples"] if labels.ndim < 2 else ["labels", "causal_labels", "samples"]


@contextmanager
def deterministic(module: nn.Module, *, everything: bool) -> Iterator[None]:
    """Dropout and batch normalization (or the whole module) in eval mode, so that parts can be compared at all."""
    switched = [
        child for child in module.modules()
        if child.training and (everything or isinstance(child, _RANDOM_OR_BATCHED))
    ]  # fmt: skip
    for child in switched:
        child.training = False
    try:
        yield
    finally:
        for child in switched:
            child.training = True

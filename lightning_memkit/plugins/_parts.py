"""Run one training batch in parts: weigh, move, step, accumulate, log once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_memkit.micro_batching import (
    Weigher,
    batch_size,
    even_sizes,
    joined,
    normalized,
    split_batch,
)
from lightning_memkit.plugins import _seam
from lightning_memkit.plugins._logs import LoggedValues
from lightning_memkit.plugins._ranks import Ranks
from lightning_memkit.token_parts import TokenPart, extent_of, parts_by_tokens, take_part, widened

Splitter = Callable[[Any, Sequence[int]], Sequence[Any]]

_LESS_PADDING = 0.9  # of the tokens: what makes copying and sorting rows worth while


@dataclass(kw_only=True)
class Partition:
    """How batches are split.

    Args:
        micro_batch_size: the most samples in a part.
        weigh: what a part holds of what the loss is a mean over.
        summed: the loss is a sum: every part weighs 1.
        split: the user's own splitter.
        whole: batches are not split at all.
        row_tokens: the length of the worst batch's rows, where parts of a padded batch may be formed by tokens:
            short rows together, without padding, `micro_batch_size` times so many in a part.
    """

    micro_batch_size: int
    weigh: Weigher
    summed: bool = False
    split: Splitter | None = None
    whole: bool = False
    row_tokens: int | None = None

    def cut(self, batch: Any) -> "Cut":
        """The parts of a batch."""
        if self.whole:
            return Cut(parts=[batch], sizes=[1])
        sizes = even_sizes(batch_size(batch), self.micro_batch_size)
        if len(sizes) == 1:
            return Cut(parts=[batch], sizes=sizes)
        by_tokens = self._cut_by_tokens(batch)
        return by_tokens or Cut(parts=split_batch(batch, sizes, split=self.split), sizes=sizes)

    def _cut_by_tokens(self, batch: Any) -> "Cut | None":
        """Parts by tokens, where that computes a tenth less of padding, or the same in fewer parts."""
        if self.row_tokens is None or self.split is not None:
            return None
        extent = extent_of(batch)
        if extent is None:
            return None
        places = parts_by_tokens(extent, self.micro_batch_size * self.row_tokens)
        rows = batch_size(batch)
        saves = sum(place.tokens for place in places) < _LESS_PADDING * rows * extent.columns
        if not saves and len(places) >= -(-rows // self.micro_batch_size):
            return None
        parts = [take_part(batch, place, extent.columns) for place in places]
        return Cut(
            parts=parts, sizes=[len(place.rows) for place in places], places=places, columns=extent.columns
        )


@dataclass(kw_only=True)
class Cut:
    """A batch in parts: each with its number of samples, and where it is from, if it is not a run of rows."""

    parts: list[Any]
    sizes: list[int]
    places: list[TokenPart] | None = None
    columns: int = 0

    def as_wide_as_the_batch(self, index: int, output: Any) -> Any:
        """What the step gave for a part, with the columns that the part does without."""
        return output if self.places is None else widened(output, self.places[index], self.columns)

    def rows(self, indices: Sequence[int]) -> list[int] | None:
        """The batch's rows that some parts hold; None where they are in order."""
        return None if self.places is None else [row for i in indices for row in self.places[i].rows]


@dataclass(kw_only=True)
class _Window:
    """Batches that are accumulated into one step, weighed exactly: what each has counted so far."""

    reference: float = 0.0
    counted: float = 0.0


@dataclass(kw_only=True)
class _Attempt:
    """What one try at a batch has come to."""

    losses: list[Tensor] = field(default_factory=list)
    extras: list[dict[str, Any]] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)  # of the parts that have a loss, as are sizes
    sizes: list[int] = field(default_factory=list)
    rows: list[int] | None = None
    logged: list[tuple[float, list[dict[str, Any]]]] = field(default_factory=list)
    sizes_logged: list[int] = field(default_factory=list)


class PartsRunner:
    """Runs a `Step` in parts with the full batch's result.

    Args:
        trainer: the trainer whose step it is.
        transfer: moves a part to the device, with the user's transfer hooks.
        partition: how to split; its `micro_batch_size` shrinks after an OOM.
        exact_window: weigh the batches of an accumulation window by what they hold (`effective_batch_size`).
    """

    def __init__(
        self,
        trainer: Trainer,
        transfer: Callable[[Any], Any],
        partition: Partition,
        *,
        exact_window: bool,
    ) -> None:
        self.partition = partition
        self.unsplittable = ""  # why the loss can't be split, where that is known and nothing is split yet
        self.phase = ""  # what runs, for those who say what failed
        self.logs = LoggedValues()
        self.ranks = Ranks()
        self._trainer = trainer
        self._transfer = transfer
        self._exact_window = exact_window
        self._window = _Window()

    def run(self, step: _seam.Step) -> tuple[Tensor | None, dict[str, Any]]:
        """Forward, zero_grad and backward of the step's batch, in parts; gradients are the full batch's."""
        attempt = _Attempt()
        self._attempt(step, attempt)
        self.phase = "after backward, in hooks, clipping or the optimizer's step"
        return self._result(attempt)

    def run_again(self, step: _seam.Step) -> None:
        """Only for the gradients: nothing is logged or counted a second time."""
        undo = [step.keep_counters(), _seam.keep_results(self._trainer)]
        try:
            self._attempt(step, _Attempt())
        finally:
            for put_back in undo:
                put_back()

    def _attempt(self, step: _seam.Step, attempt: _Attempt) -> None:
        if self._exact_window and step.starts_window:
            self._window = _Window()
        self.phase = "in splitting and weighing the batch"
        cut, weights = self._weighed(step.batch)
        kept = self._kept(weights)
        self.ranks.attempt(
            lambda: self._run_parts(step, attempt, cut, weights, kept), ends_window=step.ends_window
        )
        if self._exact_window and step.ends_window:
            self._finish_window(step)

    def _weighed(self, batch: Any) -> "tuple[Cut, list[float]]":
        """The parts of a batch, and the share of each in what the loss is a mean over, over all ranks."""
        partition, cuts, counts = self.partition, [], []

        def count() -> list[float]:
            cuts.append(partition.cut(batch))
            even = partition.whole or partition.summed
            counts.extend(1.0 if even else float(partition.weigh(part)) for part in cuts[0].parts)
            return [sum(counts)]

        # Gradients are averaged over ranks; shares are of what all ranks hold together.
        total = self.ranks.totals(count)[0] / self._trainer.world_size
        if partition.summed:
            return cuts[0], counts
        if self._exact_window:
            self._window.reference = self._window.reference or total
            self._window.counted += total
            if total == 0:  # the window's other batches may hold some
                return cuts[0], [0.0] * len(counts)
            total = self._window.reference
        return cuts[0], normalized(counts, total=total)

    def _kept(self, weights: list[float]) -> list[int | None]:
        """Which parts run: those that count, all of them where ranks meet in every part; None repeats the first."""
        if self.ranks.uncounted != "backward":
            # Where nothing is counted, one part still runs, for what it returns and logs.
            return [index for index, weight in enumerate(weights) if weight > 0] or [0]
        return [*range(len(weights)), *[None] * (self.ranks.most_parts(len(weights)) - len(weights))]

    def _run_parts(
        self, step: _seam.Step, attempt: _Attempt, cut: Cut, weights: list[float], kept: list[int | None]
    ) -> None:
        counted: list[int] = []
        for position, index in enumerate(kept):
            which = f"of part {position + 1} of {len(kept)}"
            repeated = index is None
            weight, index = 0.0 if repeated else weights[index or 0], index or 0
            loss, extra, logged = self.ranks.part(
                lambda index=index, weight=weight, which=which, first=position == 0: self._run_part(
                    step, cut.parts[index], weight, which, first=first
                ),
                counts=weight > 0,
                last=position == len(kept) - 1 and step.ends_window,
                smallest=lambda: self._run_smallest(step),
            )
            if repeated:
                continue
            attempt.logged.append((weight, logged))
            attempt.sizes_logged.append(cut.sizes[index])
            if loss is not None and (weight > 0 or len(kept) == 1):
                attempt.weights.append(weight)
                attempt.sizes.append(cut.sizes[index])
                attempt.losses.append(loss)
                attempt.extras.append(cut.as_wide_as_the_batch(index, extra))
                counted.append(index)
            del loss, extra
        attempt.rows = cut.rows(counted)

    def _run_part(
        self, step: _seam.Step, part: Any, weight: float, which: str, *, first: bool
    ) -> tuple[Tensor | None, dict[str, Any], list[dict[str, Any]]]:
        """Transfer, forward and backward of one part: its detached loss, what else it returned, what it logged."""
        self.phase = f"in forward {which}"
        part = self._transfer(part)
        with _seam.logging_held(self._trainer) as logged:
            loss, extra = step.forward(part)
            if first:
                step.zero_grad()
            if loss is None:
                return None, extra, logged
            self.phase = f"in backward {which}"
            scaled = self._scaled(step, loss, weight)
            if scaled is not None:
                step.backward(scaled)
        return loss.detach(), extra, logged

    def _run_smallest(self, step: _seam.Step) -> None:
        """Forward and backward of one row, which count for nothing."""
        rows = 1 if self.partition.whole else batch_size(step.batch)
        part = step.batch
        if rows > 1:
            part = split_batch(step.batch, [1, rows - 1], split=self.partition.split)[0]
        with _seam.logging_held(self._trainer):
            loss, _ = step.forward(self._transfer(part))
            if loss is not None:
                step.quiet_backward(loss * 0)

    def _scaled(self, step: _seam.Step, loss: Tensor, weight: float) -> Tensor | None:
        """What backward starts from; of a part that does not count what other ranks need of it."""
        if weight > 0:
            return loss * (weight if self._exact_window else weight / self._trainer.accumulate_grad_batches)
        if self.ranks.uncounted == "backward":
            return loss * 0
        if self.ranks.uncounted == "skip":
            return None
        # Its loss may be nan (a mean over nothing).
        return torch.stack([p.sum() * 0 for p in _parameters(step) if p.requires_grad]).sum()

    def _finish_window(self, step: _seam.Step) -> None:
        """Bring the window's gradients from the first batch's scale to the whole window's."""
        factor = self._window.reference / self._window.counted if self._window.counted else 1.0
        gradients = [parameter.grad for parameter in _parameters(step) if parameter.grad is not None]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)

    def _result(self, attempt: _Attempt) -> tuple[Tensor | None, dict[str, Any]]:
        for entry in self.logs.merged(attempt.logged, attempt.sizes_logged):
            _seam.log_now(self._trainer, entry)
        if not attempt.losses:
            return None, {}
        total = sum(attempt.weights)
        shares = (
            [weight / total for weight in attempt.weights] if total and not self.partition.summed else None
        )
        shares = shares or attempt.weights
        extra = joined(attempt.extras, shares, attempt.sizes, attempt.rows)
        return joined(attempt.losses, shares, attempt.sizes), extra


def _parameters(step: _seam.Step) -> Iterator[torch.nn.Parameter]:
    for group in step.optimizer.param_groups:
        yield from group["params"]

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
        cut = self.partition.cut(step.batch)
        parts = cut.parts
        if self._exact_window and step.starts_window:
            self._window = _Window()
        weights = self._weights(parts)
        # Where nothing is counted, one part still runs: other ranks wait for this one's gradients. Under a
        # strategy that communicates in every part, all run.
        kept = [index for index, weight in enumerate(weights) if weight > 0] or [0]
        if _seam.communicates_in_every_part(self._trainer):
            kept = list(range(len(parts)))
        counted: list[int] = []
        for position, index in enumerate(kept):
            last = position == len(kept) - 1
            self.phase = f"in forward of part {position + 1} of {len(kept)}"
            part = self._transfer(parts[index])
            block = _seam.no_gradient_sync(self._trainer, block=not (last and step.ends_window))
            with block, _seam.logging_held(self._trainer) as logged:
                loss, extra = step.forward(part)
                attempt.logged.append((weights[index], logged))
                attempt.sizes_logged.append(cut.sizes[index])
                if position == 0:
                    step.zero_grad()
                if loss is not None and (weights[index] > 0 or self._trainer.world_size > 1):
                    self.phase = f"in backward of part {position + 1} of {len(kept)}"
                    step.backward(self._scaled(step, loss, weights[index]))
                if loss is not None and (weights[index] > 0 or len(kept) == 1):
                    attempt.weights.append(weights[index])
                    attempt.sizes.append(cut.sizes[index])
                    attempt.losses.append(loss.detach())
                    attempt.extras.append(cut.as_wide_as_the_batch(index, extra))
                    counted.append(index)
            del part, loss, extra
        attempt.rows = cut.rows(counted)
        if self._exact_window and step.ends_window:
            self._finish_window(step)

    def _weights(self, parts: list[Any]) -> list[float]:
        """The share of each part in what the loss is a mean over, over all ranks."""
        if self.partition.summed:
            return [1.0] * len(parts)
        whole = self.partition.whole
        counts = [1.0 if whole else float(self.partition.weigh(part)) for part in parts]
        total, world = sum(counts), self._trainer.world_size
        if world > 1:
            # DDP averages gradients over ranks; shares are of what all ranks hold together.
            everywhere = torch.tensor(total, dtype=torch.float64, device=self._trainer.strategy.root_device)
            total = float(self._trainer.strategy.reduce(everywhere, reduce_op="sum")) / world
        if self._exact_window:
            self._window.reference = self._window.reference or total
            self._window.counted += total
            if total == 0:  # the window's other batches may hold some
                return [0.0] * len(counts)
            total = self._window.reference
        return normalized(counts, total=total)

    def _scaled(self, step: _seam.Step, loss: Tensor, weight: float) -> Tensor:
        if weight == 0:  # its loss may be nan (a mean over nothing); its gradient is exactly zero
            return torch.stack([p.sum() * 0 for p in _parameters(step) if p.requires_grad]).sum()
        return loss * (weight if self._exact_window else weight / self._trainer.accumulate_grad_batches)

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

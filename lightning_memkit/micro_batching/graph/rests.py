"""Rests: the parts of a loss without a gradient (a constant, an entropy of the targets), and how they add up.

No graph shows the divisor of a rest. It is learned from rows that ran whole and in micro-batches: of the
candidate ways to weigh micro-batches, those that reproduce the whole batch's number are kept. Only the
reported loss depends on this.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

import torch
from torch import Tensor

from lightning_memkit.micro_batching.graph.loss_rules import LossRules
from lightning_memkit.micro_batching.graph.term_rules import Law

Way = int | Literal["rows", "sum"]  # weighed as the term whose rule has this index; a mean over rows; a sum


@dataclass(frozen=True, kw_only=True)
class Rest:
    """The rest of a micro-batch's loss.

    Args:
        pieces: for each rule, what is added to its term alone; last, what is added to several or none.
        counts: the micro-batch's count in each term.
        rows: its number of rows.
    """

    pieces: Sequence[Tensor]
    counts: Sequence[float]
    rows: float


class RestRules:
    """How each piece of the micro-batches' rests adds up to the whole batch's.

    Until a comparison shows otherwise, a piece that is added to one term is weighed as that term, and the
    last piece as a mean over rows.

    Args:
        count: the number of terms of the loss.

    Attributes:
        seen: the loss has a rest, so its pieces are noted in every micro-batch.
        untold: the rest of the whole batch can't be computed: a piece was neither a mean over rows, nor a
            mean over a term's counts, nor a sum; or a piece that varies was never compared, or was nan in a
            micro-batch (beside a mean over nothing).
    """

    def __init__(self, count: int) -> None:
        self.seen = self.untold = False
        self._laws: list[Law] = []
        terms: list[Way] = list(range(count))
        own: list[Way] = [*terms, "rows"]
        every: list[Way] = ["rows", *terms, "sum"]
        self._open: list[list[Way]] = [[first, *(way for way in every if way != first)] for first in own]
        self._varies, self._is_compared = [False] * len(own), [False] * len(own)

    @property
    def pieces(self) -> int:
        """The number of pieces of a rest."""
        return len(self._open)

    def learn(
        self, rules: LossRules, whole: Rest, parts: Sequence[Rest], rounding: float, noise: float
    ) -> None:
        """Of the ways of weighing that held so far, keep those that hold in this comparison.

        Args:
            rules: how the terms add up.
            whole: the rest of some rows run whole.
            parts: the rests of their micro-batches.
            rounding: the rounding error of the loss and the terms, whose difference a rest is.
            noise: the relative noise of the rest itself.
        """
        self._laws = [rule.law for rule in rules.rules]
        for place, ways in enumerate(self._open):
            target, pieces = float(whole.pieces[place]), [float(part.pieces[place]) for part in parts]
            # A rest beside a mean over nothing is nan.
            told = [value for value in (target, *pieces) if isfinite(value)]
            largest = max(map(abs, told), default=0.0)
            if largest <= rounding:
                continue
            allowed = rounding + noise * largest
            self.seen = True
            self._varies[place] = self._varies[place] or max(told) - min(told) > allowed
            if len(told) <= len(pieces):
                continue
            self._is_compared[place] = True
            errors = [abs(_dot(self._weights(way, parts), pieces) - target) for way in ways]
            # Drop a way only if another is clearly better; ways that differ by rounding stay, in order.
            most = min(allowed, 3 * min(errors) + allowed / 20)
            kept: list[Way] = [way for way, error in zip(ways, errors, strict=True) if error <= most]
            self.untold = self.untold or not kept
            if kept:
                ways[:] = kept

    def joined(self, parts: Sequence[Rest]) -> Tensor:
        """The whole batch's rest; micro-batches whose rest is nan are left out."""
        if not self._laws:  # nothing was compared yet
            self._laws, self.untold = [Law.MEAN] * (self.pieces - 1), True
        total = torch.zeros_like(parts[0].pieces[0])
        for place, (way, *_) in enumerate(self._open):
            pieces = torch.stack([part.pieces[place] for part in parts])
            weights = torch.tensor(self._weights(way, parts), dtype=torch.float64).to(pieces)
            is_told = pieces.isfinite()
            value = (torch.where(is_told, pieces, 0.0) * weights).sum()
            if not self._is_sum(way):
                value = value / torch.where(is_told, weights, 0.0).sum().clamp(min=1e-30)
            total = total + value
            if self._varies[place] and not self.untold:
                self.untold = not self._is_compared[place] or bool((~is_told & (weights > 0)).any())
        return total

    def _is_sum(self, way: Way) -> bool:
        return way == "sum" or (isinstance(way, int) and self._laws[way] is Law.SUM)

    def _weights(self, way: Way, parts: Sequence[Rest]) -> list[float]:
        if self._is_sum(way):
            return [1.0] * len(parts)
        if isinstance(way, int) and self._laws[way] is Law.MEAN:
            held = [part.counts[way] for part in parts]
        else:
            held = [part.rows for part in parts]
        total = sum(held)
        return [one / total for one in held] if total else [1.0 / len(parts)] * len(parts)


def _dot(weights: Sequence[float], pieces: Sequence[float]) -> float:
    return sum(weight * piece for weight, piece in zip(weights, pieces, strict=True))

"""What has no gradient in a loss, a constant or an entropy of the targets: how that of parts makes the whole's.

No graph shows what it is divided by. Rows that ran whole and in parts tell it: of the ways to weigh parts, those that
give the whole's number stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

import torch
from torch import Tensor

from lightning_memkit.micro_batching.graph.loss_rules import LossRules
from lightning_memkit.micro_batching.graph.term_rules import Law

Way = int | Literal["rows", "sum"]  # as a term counts, the place of its rule; a mean over rows; a sum


@dataclass(frozen=True, kw_only=True)
class Rest:
    """What has no gradient in a micro-batch's loss.

    Args:
        pieces: what is added to each term alone, one a rule; last what is left beside all.
        counts: what the micro-batch counts in each term.
        rows: that it has.
    """

    pieces: Sequence[Tensor]
    counts: Sequence[float]
    rows: float


class RestRules:
    """How each piece of the rests goes together.

    What is added to one term goes as that term does, what is beside several is a mean over rows, until rows are seen
    that tell otherwise.

    Args:
        count: terms of the loss.

    Attributes:
        seen: there is something without a gradient: its pieces are to be noted in every micro-batch.
        untold: a piece was neither a mean over rows, nor one over what a term counts, nor a sum; or one that differs
            among rows can't be read of a micro-batch, where it stands beside a mean over nothing, or of no comparison
            could be read as a whole.
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
        """How many pieces a rest has."""
        return len(self._open)

    def learn(
        self, rules: LossRules, whole: Rest, parts: Sequence[Rest], rounding: float, noise: float
    ) -> None:
        """Keep the ways of weighing that hold here, of those that held before.

        Args:
            rules: how the terms go together.
            whole: the rest of some rows.
            parts: those of their micro-batches.
            rounding: of the numbers that a rest is the difference of.
            noise: that a rest has itself, relative.
        """
        self._laws = [rule.law for rule in rules.rules]
        for place, ways in enumerate(self._open):
            target, pieces = float(whole.pieces[place]), [float(part.pieces[place]) for part in parts]
            told = [
                value for value in (target, *pieces) if isfinite(value)
            ]  # beside a mean over nothing is nan
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
            # A clear lead only: ways that differ by rounding stay open, in their order.
            most = min(allowed, 3 * min(errors) + allowed / 20)
            kept: list[Way] = [way for way, error in zip(ways, errors, strict=True) if error <= most]
            self.untold = self.untold or not kept
            if kept:
                ways[:] = kept

    def joined(self, parts: Sequence[Rest]) -> Tensor:
        """The whole's rest; where a micro-batch's can't be read, that of the others."""
        if not self._laws:  # no rows have told anything
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

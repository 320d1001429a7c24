"""Divisors of 1 that may stand for a count of 1, or keep a term from being divided by zero: which of the two they are.

`loss.sum() / positives.sum().clamp(min=1)`, the usual normalisation of detectors, divides by 1 where a micro-batch
holds one positive and where it holds none, and is not zero in either case. No micro-batch alone tells them apart; the
divisor of two as one does.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

WHOLE = None  # a look at the whole batch
_MOST_SAVED = 2**16  # elements; divisors, and factors that a walk over the graph compares
_SAME = 1e-6
_SMALLEST_COUNT = 1e-3  # an epsilon beside it is none

Look = tuple[int, int] | None  # two micro-batches as one, or `WHOLE`


@dataclass(kw_only=True)
class LoneCounts:
    """What the micro-batches of a batch count, and the looks that tell what their lone divisors are.

    Args:
        counts: of each micro-batch, what each term counts in it.
        lone: of each, the terms that are divided by 1 for a reason that is not known.
        sums: terms that seem to be sums: they were divided by 1 in all that was compared.
        adjacent: only neighbours can be run as one: a batch of the user's own structure.
        why: there are no totals.
    """

    counts: list[tuple[float, ...]]
    lone: list[frozenset[int]]
    sums: frozenset[int] = frozenset()
    adjacent: bool = False
    why: str = "on another rank"
    _told: dict[Look, Sequence[float]] = field(default_factory=dict)

    @property
    def terms(self) -> list[int]:
        """Those that are to be looked up."""
        return sorted(frozenset[int]().union(*self.lone))

    def looks(self) -> list[Look]:
        """The looks that are needed next: each lone micro-batch beside another; the whole where these don't do."""
        needed = dict.fromkeys(look for index in self.terms for look in self._looks_at(index))
        return [look for look in needed if look not in self._told]

    def learn(self, look: Look, counts: Sequence[float]) -> None:
        """What the terms counted in a look."""
        self._told[look] = counts

    def totals(self) -> list[float] | None:
        """What each term counts in the whole batch; None where looks failed, or told what counts don't explain."""
        totals = [sum(own[index] for own in self.counts) for index in range(len(self.counts[0]))]
        for index in self.terms:
            if any(look not in self._told for look in self._looks_at(index)):
                self.why = "a divisor of 1 in micro-batches that can't be run as one"
                return None
            if WHOLE in self._looks_at(index):
                totals[index] = self._told[WHOLE][index]
                if index in self.sums and abs(totals[index] - 1) > _SMALLEST_COUNT:
                    self.why = (
                        f"a term divided by 1 in micro-batches, and by {totals[index]:g} in their batch"
                    )
                    return None
                continue
            for look in self._looks_at(index):
                missing = 0.0 if look is None else self._missing(index, look)
                if missing is None:
                    return None
                totals[index] -= missing
        return totals

    def _looks_at(self, index: int) -> list[Look]:
        if index in self.sums:
            return [WHOLE]
        asked = [part for part, lone in enumerate(self.lone) if index in lone]
        beside = {part: self._beside(index, part) for part in asked}
        found: list[Look] = [(other, part) for part, other in beside.items() if other is not None]
        alone = [part for part, other in beside.items() if other is None]
        # Two that count 1 each are divided by 2. The last of an odd number goes with the one before.
        pairs = [(first, second) for first, second in zip(alone[:-1:2], alone[1::2], strict=True)]
        if len(alone) % 2:
            pairs += [(alone[-2], alone[-1])] if len(alone) > 1 else []
        is_told = all(self._missing(index, pair) == 0 for pair in pairs if pair in self._told)
        near = not self.adjacent or all(second - first == 1 for first, second in pairs)
        if (alone and not pairs) or not is_told or not near:
            return [WHOLE]
        return [*found, *pairs]

    def _beside(self, index: int, part: int) -> int | None:
        """The micro-batch that counts the least more than one of a term, so that its divisor is its count."""
        least = 2 * (1 - _SAME) * self.counts[part][index]
        others = [
            other
            for other, (own, lone) in enumerate(zip(self.counts, self.lone, strict=True))
            if index not in lone and own[index] >= least and (not self.adjacent or abs(other - part) == 1)
        ]
        return min(others, key=lambda other: self.counts[other][index], default=None)

    def _missing(self, index: int, look: tuple[int, int]) -> float | None:
        """What two micro-batches as one are divided by less than apart: nothing, or the divisor of 1."""
        together = self._told[look][index]
        first, second = (self.counts[part][index] for part in look)
        for explained in (0.0, second):
            if abs(first + second - together - explained) <= _SAME * together:
                return explained
        apart = f"{first:g} and by {second:g}"
        self.why = f"a term divided by {apart} in two micro-batches, and by {together:g} in both as one"
        return None


@contextmanager
def saving_shapes_only() -> Iterator[None]:
    """Within it autograd's graph holds no tensor of more than 65,536 elements: it can be read, and not run backward.

    A forward takes the memory of one without a gradient.
    """

    def pack(tensor: Tensor) -> Any:
        if tensor.numel() <= _MOST_SAVED or tensor.layout is not torch.strided:
            return tensor
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")

    with saved_tensors_hooks(pack, lambda kept: kept):
        yield

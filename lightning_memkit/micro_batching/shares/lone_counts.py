"""The least divisors of a term, which may be counts, or keep it from being divided by less: which of the two they are.

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

from lightning_memkit.micro_batching.graph.graph_nodes import as_saved
from lightning_memkit.micro_batching.graph.term_rules import ALIKE, share_of
from lightning_memkit.micro_batching.shares.batch_counts import Shown

WHOLE = None  # a look at the whole batch
_MOST_SAVED = 2**16  # elements; divisors, and factors that a walk over the graph compares
_SAME = 1e-6

Look = tuple[int, int] | None  # two micro-batches as one, or one twice; or `WHOLE`


@dataclass(kw_only=True)
class LoneCounts:
    """What the micro-batches of a batch count, and the looks that tell what their lone divisors are.

    Args:
        counts: of each micro-batch, what each term counts in it.
        lone: of each, the terms that are divided by 1, or the least so far, for a reason that is not known.
        whole: terms of no law: the whole batch alone tells what they are divided by.
        sums: terms that seem to be sums: they were divided by the same number in all that was compared. The whole
            batch tells, or two micro-batches at a time where it can't be run (see `unproven`).
        doubted: means of which little is known yet, or a divisor was kept: likewise.
        runs_whole: the whole batch can be run.
        adjacent: only neighbours can be run as one: a batch of the user's own structure.
        adds_up: the whole batch is one of several, those of other ranks, of which the counts are added up.
        why: there are no totals.

    Attributes:
        unproven: seeming sums that two micro-batches at a time have told, and not the whole batch.
    """

    counts: list[tuple[float, ...]]
    lone: list[frozenset[int]]
    whole: frozenset[int] = frozenset()
    sums: frozenset[int] = frozenset()
    doubted: frozenset[int] = frozenset()
    runs_whole: bool = True
    adjacent: bool = False
    adds_up: bool = False
    why: str = "on another rank"
    unproven: set[int] = field(default_factory=set)
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
        """What each term counts in the whole batch, and sums are divided by there; None where looks failed.

        A count of less than half of what the divisor is kept at is taken for nothing, where batches are added up.
        """
        totals = [sum(own[index] for own in self.counts) for index in range(len(self.counts[0]))]
        for index in self.terms:
            looks = self._looks_at(index)
            if any(look not in self._told for look in looks):
                self.why = "a divisor that may be kept from less, in micro-batches that can't be run as one"
                return None
            if WHOLE in looks:
                twice = [look for look in looks if look]
                whole = self._told[WHOLE][index]
                totals[index] = sum(self._twice(index, part) for part, _ in twice) if twice else whole
            elif index in self.sums:
                totals[index] = self._lone(index)[0]
                self.unproven.add(index)
            else:
                totals[index] -= sum((look and self._missing(index, look)) or 0.0 for look in looks)
        return totals

    def least(self, index: int) -> float:
        """What the whole batch's divisor is kept at, where it counts less; else 0."""
        whole = self._told.get(WHOLE)
        return whole[index] if whole is not None and self._is_kept_whole(index) else 0.0

    def shown(self, index: int, total: float) -> Shown:
        """What a term's total in the whole batch tells of the divisors of its micro-batches."""
        own = self._lone(index)
        if index in self.sums | self.whole:
            return Shown.OWN if all(share_of(divisor, total) == 1 for divisor in own) else Shown.KEPT
        missing = sum(counts[index] for counts in self.counts) - total
        if abs(missing) <= _SAME * abs(total):
            return Shown.OWN
        least = (1 + _SAME) * min(map(abs, own))
        kept = sum(abs(divisor) for divisor in own if abs(divisor) <= least)
        explained = missing * total >= 0 and 0 < abs(missing) <= (1 + _SAME) * kept
        return Shown.KEPT if explained else Shown.UNLIKE

    def _lone(self, index: int) -> list[float]:
        return [counts[index] for counts, lone in zip(self.counts, self.lone, strict=True) if index in lone]

    def _looks_at(self, index: int) -> list[Look]:
        looks = self._looks_within(index)
        if looks == [WHOLE] and self._is_kept_whole(index):
            return [WHOLE, *((part, part) for part, lone in enumerate(self.lone) if index in lone)]
        return looks

    def _is_kept_whole(self, index: int) -> bool:
        """Whether the whole batch, one of several, is divided by no more than its micro-batches: as a lone one is."""
        whole, own = self._told.get(WHOLE), self._lone(index)
        if not self.adds_up or whole is None or not own or index in self.sums | self.whole:
            return False
        return abs(whole[index]) <= (1 + _SAME) * min(map(abs, own))

    def _twice(self, index: int, part: int) -> float:
        """What a micro-batch counts: half of its divisor beside itself; nothing, where that is no more than alone."""
        twice = self._told[part, part][index]
        return twice / 2 if abs(twice) > (1 + _SAME) * abs(self.counts[part][index]) else 0.0

    def _looks_within(self, index: int) -> list[Look]:
        if index in self.whole or (self.runs_whole and index in self.sums | self.doubted):
            return [WHOLE]
        asked = [part for part, lone in enumerate(self.lone) if index in lone]
        if index in self.doubted:  # what is more than the least is not kept
            least = (1 + _SAME) * min(abs(self.counts[part][index]) for part in asked)
            asked = [part for part in asked if abs(self.counts[part][index]) <= least]
        beside = {part: None if index in self.sums else self._beside(index, part, asked) for part in asked}
        found = [(other, part) for part, other in beside.items() if other is not None]
        alone = [part for part, other in beside.items() if other is None]
        # Two that count as much as they are divided by are divided by that together. The last of an odd number goes
        # with the one before.
        pairs = list(zip(alone[:-1:2], alone[1::2], strict=True))
        if len(alone) % 2:
            pairs += [(alone[-2], alone[-1])] if len(alone) > 1 else []
        is_told = all(self._adds_up(index, pair) for pair in pairs if pair in self._told)
        is_told = is_told and not any(
            self._missing(index, look) is None for look in found if look in self._told
        )
        near = not self.adjacent or all(second - first == 1 for first, second in pairs)
        if (alone and not pairs) or not is_told or not near:
            return [WHOLE]
        return [*found, *pairs]

    def _adds_up(self, index: int, pair: tuple[int, int]) -> bool:
        """Whether two micro-batches as one are divided by what they are apart; a seeming sum by the same number."""
        if index not in self.sums:
            return self._missing(index, pair) == 0
        together = self._told[pair][index]
        return all(share_of(self.counts[part][index], together) == 1 for part in pair)

    def _beside(self, index: int, part: int, asked: Sequence[int]) -> int | None:
        """The micro-batch that counts the least more of a term than is kept, so that its divisor is its count."""
        least = 2 * (1 - _SAME) * abs(self.counts[part][index])
        others = [
            other
            for other, own in enumerate(self.counts)
            if other not in asked
            and abs(own[index]) >= least
            and (not self.adjacent or abs(other - part) == 1)
        ]
        return min(others, key=lambda other: abs(self.counts[other][index]), default=None)

    def _missing(self, index: int, look: tuple[int, int]) -> float | None:
        """What two micro-batches as one are divided by less than apart: nothing, or what the second is divided by.

        None for what is neither: it counts some, and the whole batch tells.
        """
        together = self._told[look][index]
        first, second = (self.counts[part][index] for part in look)
        for explained in (0.0, second):
            if abs(first + second - together - explained) <= ALIKE * abs(together):
                return explained
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

    with saved_tensors_hooks(pack, as_saved):
        yield

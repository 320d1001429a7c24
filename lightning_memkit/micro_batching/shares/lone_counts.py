"""Find out whether the least divisors of a term are counts or clamped, by running two micro-batches as one.

`loss.sum() / positives.sum().clamp(min=1)`, the usual normalisation of detectors, divides by 1 if a
micro-batch holds one positive and if it holds none, and is not zero in either case. No micro-batch by itself
tells which; the divisor of two that are run as one does. Such a run is called a look, and a divisor that
needs one is called lone.
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
_MOST_SAVED = 2**16  # elements of a saved tensor that is kept: divisors, and factors of terms
_SAME = 1e-6

Look = tuple[int, int] | None  # the indices of two micro-batches run as one (or of one, doubled); or `WHOLE`


@dataclass(kw_only=True)
class LoneCounts:
    """The counts of a batch's micro-batches, and the looks that decide what their lone divisors are.

    Args:
        counts: for each micro-batch, the count of each term.
        lone: for each micro-batch, the terms with a lone divisor: 1 or the least so far, and perhaps clamped.
        whole: terms of no law: only a look at the whole batch gives their divisor.
        sums: terms that seem to be sums, because their divisors were equal in all comparisons. A look at the
            whole batch decides, or looks at two micro-batches if it can't be run (see `unproven`).
        doubted: means with too few looks, or of which a divisor was clamped: likewise.
        runs_whole: the whole batch can be run.
        adjacent: only neighbours can be run as one, in a batch of the user's own structure.
        adds_up: other ranks have batches, too, whose counts are added to this one's.
        why: the reason why there are no totals.
        numbers: for each micro-batch, the step's own number in the divisor of each term.

    Attributes:
        unproven: terms taken for sums after looks at two micro-batches, without one at the whole batch.
        vague: terms of which micro-batches are taken for such that count nothing, and may count up to half of a clamp.
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
    numbers: list[tuple[float, ...]] = field(default_factory=list)
    unproven: set[int] = field(default_factory=set)
    vague: set[int] = field(default_factory=set)
    _told: dict[Look, Sequence[float]] = field(default_factory=dict)
    _doubted: dict[Look, frozenset[int]] = field(default_factory=dict)
    _numbers: dict[Look, Sequence[float]] = field(default_factory=dict)

    @property
    def terms(self) -> list[int]:
        """The terms that are to be looked up."""
        return sorted(frozenset[int]().union(*self.lone))

    def looks(self) -> list[Look]:
        """The looks needed next: each lone micro-batch with another; the whole batch if that can't decide."""
        needed = dict.fromkeys(look for index in self.terms for look in self._looks_at(index))
        return [look for look in needed if look not in self._told]

    def learn(
        self,
        look: Look,
        counts: Sequence[float],
        *,
        doubted: frozenset[int] = frozenset(),
        numbers: Sequence[float] = (),
    ) -> None:
        """Record the counts of the terms in a look, the step's own numbers, and the terms that may be clamped."""
        self._told[look] = counts
        self._doubted[look], self._numbers[look] = doubted, numbers

    def totals(self) -> list[float] | None:
        """The count of each term in the whole batch (of a sum, its divisor there); None if looks failed.

        If batches of ranks are added up, a count below half of the clamp is taken for nothing.
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
        """The clamp of the whole batch's divisor, if the batch counts less; else 0."""
        whole = self._told.get(WHOLE)
        return whole[index] if whole is not None and self._is_kept_whole(index) else 0.0

    def fraction(self, index: int) -> float:
        """What the step divides a mean over the whole batch by, if that may be clamped there; else 0.

        Such a number is no count: that of twice the rows is the same (`mask.mean().clamp(min=0.5)`).
        """
        if WHOLE not in self._told or index not in self._doubted[WHOLE]:
            return 0.0
        parts = zip(self.counts, self.numbers, strict=True)
        looks = ((self._told[look], self._numbers[look]) for look in self._told)
        read = [(counts[index], numbers[index]) for counts, numbers in [*parts, *looks]]
        elements = [count / number for count, number in read if count and number]
        grows = max(elements, default=0.0) > (1 + _SAME) * min(elements, default=0.0)
        return self._numbers[WHOLE][index] if grows else 0.0

    def shown(self, index: int, total: float) -> Shown:
        """What a term's total in the whole batch tells of its micro-batches' divisors."""
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
        """Whether this rank's whole batch has itself a lone divisor: no more than its micro-batches have."""
        whole, own = self._told.get(WHOLE), self._lone(index)
        if not self.adds_up or whole is None or not own or index in self.sums | self.whole:
            return False
        return abs(whole[index]) <= (1 + _SAME) * min(map(abs, own))

    def _twice(self, index: int, part: int) -> float:
        """A micro-batch's count: half of its divisor when doubled; nothing if that is no more than alone."""
        twice, alone = self._told[part, part][index], self.counts[part][index]
        if abs(twice) > (1 + _SAME) * abs(alone):
            return twice / 2
        counts = [own[index] for own in self.counts]
        # Of whole numbers, only nothing is clamped at 1 if doubled.
        if abs(alone) > 1 + _SAME or any(count % 1 for count in counts):
            self.vague.add(index)
        return 0.0

    def _looks_within(self, index: int) -> list[Look]:
        if index in self.whole or (self.runs_whole and index in self.sums | self.doubted):
            return [WHOLE]
        asked = [part for part, lone in enumerate(self.lone) if index in lone]
        if index in self.doubted:  # only the least divisors may be clamped
            least = (1 + _SAME) * min(abs(self.counts[part][index]) for part in asked)
            asked = [part for part in asked if abs(self.counts[part][index]) <= least]
        beside = {part: None if index in self.sums else self._beside(index, part, asked) for part in asked}
        found = [(other, part) for part, other in beside.items() if other is not None]
        alone = [part for part, other in beside.items() if other is None]
        # If two divisors are counts, the divisor of both as one is their sum. Of an odd number, the last one
        # is paired with the one before.
        pairs = list(zip(alone[:-1:2], alone[1::2], strict=True))
        if len(alone) % 2:
            pairs += [(alone[-2], alone[-1])] if len(alone) > 1 else []
        is_told = all(self._adds_up(index, pair) for pair in pairs if pair in self._told)
        is_told = is_told and not any(
            self._missing(index, look) is None for look in found if look in self._told
        )
        is_told = is_told and not any(index in self._doubted.get(look, ()) for look in [*found, *pairs])
        near = not self.adjacent or all(second - first == 1 for first, second in pairs)
        if (alone and not pairs) or not is_told or not near:
            return [WHOLE]
        return [*found, *pairs]

    def _adds_up(self, index: int, pair: tuple[int, int]) -> bool:
        """Whether the divisor of two micro-batches as one is their sum; of a seeming sum, the same number."""
        if index not in self.sums:
            return self._missing(index, pair) == 0
        together = self._told[pair][index]
        return all(share_of(self.counts[part][index], together) == 1 for part in pair)

    def _beside(self, index: int, part: int, asked: Sequence[int]) -> int | None:
        """The micro-batch with the least divisor that is surely a count: at least twice the lone one."""
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
        """By how much the divisor of two micro-batches as one is below their sum: 0, or the second's divisor.

        None for any other difference: then only the whole batch decides.
        """
        together = self._told[look][index]
        first, second = (self.counts[part][index] for part in look)
        for explained in (0.0, second):
            if abs(first + second - together - explained) <= ALIKE * abs(together):
                return explained
        return None


@contextmanager
def saving_shapes_only() -> Iterator[None]:
    """A context in which autograd saves only the shape of tensors of more than 65,536 elements.

    Graphs made in it can be read, but not run backward. A forward needs no more memory than without a
    gradient.
    """

    def pack(tensor: Tensor) -> Any:
        if tensor.numel() <= _MOST_SAVED or tensor.layout is not torch.strided:
            return tensor.detach()  # the tensor itself may be its node's output: a cycle that nothing frees
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")

    with saved_tensors_hooks(pack, as_saved):
        yield

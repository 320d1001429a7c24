"""Join micro-batches' results into the whole batch's, by rules that a comparison on few samples confirmed.

The values that a step returns, logs or sets in its module may be rows, means over samples or labels, sums or
extremes. `Joining.compare` takes the results of a small batch that was run whole and in micro-batches, and
keeps for every value the rules that give the whole's. `Joining.join` applies them to the micro-batches of
other batches.
"""

from collections.abc import Container, Sequence
from itertools import combinations, pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.micro_batching.parts.joining_rules import (
    ROUNDING,
    Counted,
    Counts,
    JoinError,
    Path,
    Rule,
    applied,
    is_one_number,
    name_of,
    relative_error,
    rule_error,
    rules_for,
    same_everywhere,
    unseen_rules,
    why_not,
)
from lightning_memkit.micro_batching.parts.nested import branch, branches, check_same_keys, rebuilt_result

# A rule is taken as certain after so many comparisons that no other kind of rule fits: for a mean, a sum or
# a concatenation; for any other rule. After the last number of comparisons it is taken as certain anyway.
_ENOUGH, _ENOUGH_OF_OTHERS, _MOST_COMPARISONS = 4, 12, 32
_UNLIKE_PARTS = 24  # the most micro-batches among which a pair that distinguishes rules is searched
_STRIDE = 7  # from one pair to the next, so that later comparisons take other micro-batches


class Joining:
    """The rules by which micro-batches' results make the whole batch's, value by value.

    Args:
        allowed: the largest relative error, by norm, that counts as rounding.
    """

    def __init__(self, allowed: float) -> None:
        self.allowed = allowed
        self.doubtful: list[str] = []  # values of the last `join` for which the remaining rules differ
        self.unlike: list[str] = []  # values of the last `join` that are to be the same in all, and are not
        self.excess = 0.0  # their largest difference, relative to what is allowed for rounding
        self.comparisons = 0
        self._telling = 0  # comparisons of a number that rules of one kind only fitted
        self._tells = False  # whether the current comparison is one of these
        self._open: dict[Path, list[Rule]] = {}

    def compare(
        self, whole: Any, parts: Sequence[Any], counts: Counts, *, allowed: float | None = None
    ) -> None:
        """Keep for every value the rules that hold in this comparison, of those that held before.

        Args:
            whole: the results of rows that were run as one.
            parts: those of their micro-batches.
            counts: the counts of these, by each way of weighing.
            allowed: the error that counts as rounding in this comparison, if it is larger than in others.

        Raises:
            JoinError: none of them gives a value of the whole.
        """
        self._tells, usual = False, self.allowed
        self.allowed = max(usual, allowed or 0.0)
        try:
            self._compare((), whole, parts, counts)
        finally:
            self.allowed = usual
        self.comparisons += 1
        self._telling += self._tells

    def join(self, parts: Sequence[Any], counts: Counts) -> Any:
        """The whole batch's results; `doubtful` names the values on which the remaining rules disagree.

        Raises:
            JoinError: the micro-batches' values can't be joined (they are padded to unequal lengths, say).
        """
        self.doubtful, self.unlike, self.excess = [], [], 0.0
        return self._join((), parts, counts)

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of the likeliest rules."""
        return frozenset(rules[0][0] for rules in self._open.values() if rules)

    @property
    def sure(self) -> bool:
        """Whether comparisons are enough that no rule fits by chance, as an extreme of few numbers may."""
        first = next((rules[0][0] for path, rules in self._open.items() if path[-1:] != ("count",)), "")
        enough = _ENOUGH if first in ("mean", "sum", "cat") else _ENOUGH_OF_OTHERS
        return self._telling >= enough or self.comparisons >= _MOST_COMPARISONS

    def telling_pair(
        self,
        parts: Sequence[Any],
        counts: Counts,
        *,
        adjacent: bool = False,
        but: Container[tuple[int, int]] = (),
    ) -> tuple[int, int] | None:
        """The two micro-batches on which the remaining rules differ the most; None if only by rounding.

        Rules of a mean that differ on many micro-batches also differ on some two of them. Comparing these
        two, run together and apart, leaves fewer rules.

        Args:
            parts: the values of a batch's micro-batches.
            counts: their counts, by each way of weighing.
            adjacent: only neighbours can be run as one.
            but: pairs that have been compared already.
        """
        best, pair = 1.0, None
        for first, second in _pairs(parts, counts, adjacent=adjacent):
            if (first, second) in but:
                continue
            two = {way: [counted[first], counted[second]] for way, counted in counts.items()}
            try:
                self.join([parts[first], parts[second]], two)
            except JoinError:
                continue
            if self.excess > best:
                best, pair = self.excess, (first, second)
        return pair

    def _allowed(self, value: Any) -> float:
        """The tolerance, or the rounding of the value's own dtype if that is larger."""
        rounding = ROUNDING.get(value.dtype, 2e-6) if isinstance(value, Tensor) else 2e-6
        return max(self.allowed, rounding)

    def _compare(self, path: Path, whole: Any, parts: Sequence[Any], counts: Counts) -> None:
        if isinstance(whole, Counted):
            self._compare((*path, "count"), whole.count, [part.count for part in parts], counts)
            values, ways = _own_way(parts, counts)
            self._compare((*path, "value"), whole.value, values, ways)
            still_open = self._open.get((*path, "value"), [])
            still_open.sort(key=lambda rule: rule[0] != whole.rule)
            return
        found = branches(whole, len(path))
        if found is None:
            self._narrow(path, whole, parts, counts, rules_for(whole, parts, counts))
            return
        if isinstance(whole, (list, tuple)) and not hasattr(whole, "_fields"):
            if sum(len(part) for part in parts) == len(whole) and self._concatenates(path, whole, parts):
                self._open[path] = [("concat",)]
                return
            self._open.pop(path, None)
        for key, value in found:
            below = [branch(part, key, path) for part in parts]
            self._compare((*path, key), value, below, counts)
        check_same_keys(path, whole, parts)

    def _concatenates(self, path: Path, whole: Sequence[Any], parts: Sequence[Any]) -> bool:
        items = [item for part in parts for item in part]
        return all(
            relative_error(item, value) <= self._allowed(value)
            for value, item in zip(whole, items, strict=True)
        )

    def _narrow(
        self, path: Path, whole: Any, parts: Sequence[Any], counts: Counts, rules: list[Rule]
    ) -> None:
        before = self._open.get(path)
        candidates = [rule for rule in rules if before is None or rule in before]
        errors = [rule_error(rule, whole, parts, counts) for rule in candidates]
        least = min(errors, default=float("inf"))
        allowed = self._allowed(whole)
        if least > allowed:
            raise JoinError(why_not(path, whole, parts, least))
        # Drop a rule only if another is clearly better: rules that differ by rounding stay, in their order.
        rounding = max(allowed / 20, 1.5 * _spacing(whole))
        if path[-1:] != ("count",) and is_one_number(
            whole
        ):  # trying all rules again on large results would cost too much
            self._tells |= len({r[0] for r in rules if rule_error(r, whole, parts, counts) <= allowed}) == 1
        self._open[path] = [
            rule
            for rule, error in zip(candidates, errors, strict=True)
            if error <= min(allowed, 3 * least + rounding)
        ]

    def _join(self, path: Path, parts: Sequence[Any], counts: Counts) -> Any:
        first = parts[0]
        if isinstance(first, Counted):
            values, ways = _own_way(parts, counts)
            count = self._join((*path, "count"), [part.count for part in parts], counts)
            return Counted(value=self._join((*path, "value"), values, ways), count=count)
        rules = self._open.get(path)
        if rules == [("concat",)]:
            return type(first)(item for part in parts for item in part)
        found = branches(first, len(path))
        if found is None:
            return self._joined_leaf(path, parts, counts, rules)
        check_same_keys(path, first, parts)
        joined = {
            key: self._join((*path, key), [branch(part, key, path) for part in parts], counts)
            for key, _ in found
        }
        return rebuilt_result(first, joined)

    def _joined_leaf(self, path: Path, parts: Sequence[Any], counts: Counts, rules: list[Rule] | None) -> Any:
        if rules is None:
            if same_everywhere(parts):
                return parts[-1]
            self.doubtful.append(name_of(path))
            self.excess = float("inf")
            rules = unseen_rules(parts, counts)
        joined = applied(rules[0], parts, counts, path)
        if rules[0] == ("same",) and not same_everywhere(parts):
            self.unlike.append(name_of(path))
        others = [other for other in rules[1:] if not _weigh_alike(rules[0], other, counts)]
        errors = [relative_error(applied(other, parts, counts, path), joined) for other in others]
        farthest, allowed = max(errors, default=0.0), self._allowed(joined)
        self.excess = max(self.excess, farthest / allowed)
        if farthest > allowed / 4:
            self.doubtful.append(name_of(path))
        return joined


def unlike_pair(
    parts: Sequence[Any],
    counts: Counts,
    *,
    adjacent: bool = False,
    but: Container[tuple[int, int]] = (),
    turn: int = 0,
) -> tuple[int, int] | None:
    """Two micro-batches with different values; None if all values are equal.

    Args:
        parts: the values of a batch's micro-batches.
        counts: their counts, by each way of weighing.
        adjacent: only neighbours can be run as one.
        but: pairs that have been compared already.
        turn: the number of comparisons so far; each turn takes another pair.
    """
    pairs = [
        pair
        for pair in _pairs(parts, counts, adjacent=adjacent, turn=turn)
        if pair not in but and not same_everywhere([parts[index] for index in pair])
    ]
    return pairs[turn * _STRIDE % len(pairs)] if pairs else None


def _pairs(parts: Sequence[Any], counts: Counts, *, adjacent: bool, turn: int = 0) -> list[tuple[int, int]]:
    """The candidate pairs: neighbours if `adjacent`, else pairs that differ in value or count.

    Of micro-batches that are alike in both, one is a candidate; each `turn` another, since what they hold may differ.
    """
    if adjacent:
        return list(pairwise(range(len(parts))))
    alike: dict[Any, list[int]] = {}
    for index, part in enumerate(parts):
        alike.setdefault((str(part), *(counted[index] for counted in counts.values())), []).append(index)
    candidates = [indices[turn % len(indices)] for indices in alike.values()]
    return [(min(pair), max(pair)) for pair in combinations(candidates[:_UNLIKE_PARTS], 2)]


def _weigh_alike(rule: Rule, other: Rule, counts: Counts) -> bool:
    """Whether two means give the same result here, because their counts are proportional."""
    if rule[:-1] != other[:-1] or not {rule[-1], other[-1]} <= counts.keys():
        return False
    one, two = counts[rule[-1]], counts[other[-1]]
    a, b = sum(one), sum(two)
    return a * b > 0 and all(abs(x * b - y * a) <= 1e-9 * a * b for x, y in zip(one, two, strict=True))


def _spacing(value: Any) -> float:
    """The machine epsilon of a value's dtype."""
    is_rounded = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return torch.finfo(value.dtype).eps if is_rounded else 0.0


def _own_way(parts: Sequence[Counted], counts: Counts) -> tuple[list[Any], Counts]:
    values, own = [part.value for part in parts], [part.count for part in parts]
    return values, counts if None in own else {"its own": [float(count) for count in own], **counts}

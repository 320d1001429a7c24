"""A whole batch's results from its parts', by rules that a comparison on a few samples has shown to be right.

What a step returns, logs and sets in its module may be rows, means over this or that, sums, extremes. Which, is not
guessed: `Joining.compare` is given a small batch's results, run whole and in parts, and keeps for every value the
rules that give the whole's. `Joining.join` applies them to the parts of other batches.
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

# How many comparisons have to fit one kind of rule alone before it is taken to hold: a mean or a sum, and any other
# rule. After so many in all it is taken to hold in any case.
_ENOUGH, _ENOUGH_OF_OTHERS, _MOST_COMPARISONS = 4, 12, 32
_UNLIKE_PARTS = 24  # among which two are looked for that tell rules apart
_STRIDE = 7  # from one pair of unlike parts to the next, so that later comparisons take other parts


class Joining:
    """The rules by which results of parts make the whole's, value by value.

    Args:
        allowed: the largest relative error, by norm, that is rounding.
    """

    def __init__(self, allowed: float) -> None:
        self.allowed = allowed
        self.doubtful: list[str] = []  # values of the last `join` that the rules left give differently
        self.excess = 0.0  # how far apart they are at most, over what is allowed for rounding
        self.comparisons = 0
        self._telling = 0  # comparisons of a number in which rules of one kind alone fitted
        self._tells = False  # whether the comparison under way is one
        self._open: dict[Path, list[Rule]] = {}

    def compare(self, whole: Any, parts: Sequence[Any], counts: Counts) -> None:
        """Keep for every value the rules that hold here, of those that held before.

        Raises:
            JoinError: a value of the whole comes from its parts by none of them.
        """
        self._tells = False
        self._compare((), whole, parts, counts)
        self.comparisons += 1
        self._telling += self._tells

    def join(self, parts: Sequence[Any], counts: Counts) -> Any:
        """The whole's results; `doubtful` names those that the rules still open don't agree on.

        Raises:
            JoinError: the parts don't fit together (they are padded to unequal lengths, say).
        """
        self.doubtful, self.excess = [], 0.0
        return self._join((), parts, counts)

    @property
    def sure(self) -> bool:
        """Whether enough has been compared for a rule not to fit by chance; an extreme of few numbers often does."""
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
        """The two parts on which the rules left differ the most; None where on all by rounding only.

        Where rules of a mean differ on many parts, they do on two of them. A comparison of these two, whole and alone,
        leaves fewer rules.

        Args:
            parts: the values of a batch's parts.
            counts: what each counts.
            adjacent: only neighbours can be run as one.
            but: pairs that have been compared.
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
        """The tolerance, or what the value's own dtype rounds."""
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
        # A clear lead only: rules that differ by rounding (of the whole and of its parts) stay open, in their order.
        rounding = max(allowed / 20, 1.5 * _spacing(whole))
        if path[-1:] != ("count",) and is_one_number(
            whole
        ):  # of large results all rules would be too much work
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
    """Two parts with unlike values; None where all are alike.

    Args:
        parts: the values of a batch's parts.
        counts: what each counts.
        adjacent: only neighbours can be run as one.
        but: pairs that have been compared.
        turn: how many comparisons there were: each takes another pair.
    """
    pairs = [
        pair
        for pair in _pairs(parts, counts, adjacent=adjacent)
        if pair not in but and not same_everywhere([parts[index] for index in pair])
    ]
    return pairs[turn * _STRIDE % len(pairs)] if pairs else None


def _pairs(parts: Sequence[Any], counts: Counts, *, adjacent: bool) -> list[tuple[int, int]]:
    """The places of two parts of which values or counts differ."""
    if adjacent:
        return list(pairwise(range(len(parts))))
    unlike: dict[Any, int] = {}
    for index, part in enumerate(parts):
        unlike.setdefault((str(part), *(counted[index] for counted in counts.values())), index)
    return list(combinations(list(unlike.values())[:_UNLIKE_PARTS], 2))


def _weigh_alike(rule: Rule, other: Rule, counts: Counts) -> bool:
    """Whether two rules are the same mean here, since what they weigh by is in proportion."""
    if rule[:-1] != other[:-1] or not {rule[-1], other[-1]} <= counts.keys():
        return False
    one, two = counts[rule[-1]], counts[other[-1]]
    a, b = sum(one), sum(two)
    return a * b > 0 and all(abs(x * b - y * a) <= 1e-9 * a * b for x, y in zip(one, two, strict=True))


def _spacing(value: Any) -> float:
    """The relative distance of neighbouring numbers of a value's dtype."""
    is_rounded = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return torch.finfo(value.dtype).eps if is_rounded else 0.0


def _own_way(parts: Sequence[Counted], counts: Counts) -> tuple[list[Any], Counts]:
    values, own = [part.value for part in parts], [part.count for part in parts]
    return values, counts if None in own else {"its own": [float(count) for count in own], **counts}


# Structure: what is looked into, and put together again

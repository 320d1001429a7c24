"""A whole batch's results from its parts', by rules that a comparison on a few samples has shown to be right.

What a step returns, logs and adds to its module may be rows, means over this or that, sums, extremes. Which, is not
guessed: `Joining.compare` is given a small batch's results, run whole and in parts, and keeps for every value the
rules that give the whole's. `Joining.join` applies them to the parts of other batches.
"""

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memkit.joining_rules import (
    KEPT,
    ROUNDING,
    Change,
    Counted,
    Counts,
    JoinError,
    Path,
    Rule,
    applied,
    is_number_like,
    name_of,
    relative_error,
    rule_error,
    rules_for,
    same_everywhere,
    unseen_rules,
    why_not,
)

_DEEPEST = 12  # levels of nested results; objects may refer to each other in a circle


class Joining:
    """The rules by which results of parts make the whole's, value by value.

    Args:
        allowed: the largest relative error, by norm, that is rounding.
    """

    def __init__(self, allowed: float) -> None:
        self.allowed = allowed
        self.doubtful: list[str] = []  # values of the last `join` that the rules left give differently
        self._open: dict[Path, list[Rule]] = {}

    def compare(self, whole: Any, parts: Sequence[Any], counts: Counts) -> None:
        """Keep for every value the rules that hold here, of those that held before.

        Raises:
            JoinError: a value of the whole comes from its parts by none of them.
        """
        self._compare((), whole, parts, counts)

    def join(self, parts: Sequence[Any], counts: Counts) -> Any:
        """The whole's results; `doubtful` names those that the rules still open don't agree on.

        Raises:
            JoinError: the parts don't fit together (they are padded to unequal lengths, say).
        """
        self.doubtful = []
        return self._join((), parts, counts)

    def keeps(self, path: Path) -> bool:
        """Whether what the parts leave behind one after the other is what the whole leaves, below a path."""
        below = [rules[0] for key, rules in self._open.items() if key[: len(path)] == path]
        return all(rule in (KEPT, ("concat",)) for rule in below)

    def alike(self, a: Any, b: Any) -> bool:
        """Whether the numbers of two results are the same up to rounding."""
        numbers = [[leaf for leaf in leaves(result) if is_number_like(leaf)] for result in (a, b)]
        return len(numbers[0]) == len(numbers[1]) and all(
            relative_error(x, y) <= self._allowed(y) for x, y in zip(*numbers, strict=True)
        )

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
        branches = _branches(whole, len(path))
        if branches is None:
            self._narrow(path, whole, parts, counts, rules_for(whole, parts, counts))
            return
        if isinstance(whole, (list, tuple)) and not hasattr(whole, "_fields"):
            if sum(len(part) for part in parts) == len(whole) and self._concatenates(path, whole, parts):
                self._open[path] = [("concat",)]
                return
            self._open.pop(path, None)
        for key, value in branches:
            below = [_branch(part, key, path) for part in parts]
            self._compare((*path, key), value, below, counts)
        _check_same_keys(path, whole, parts)

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
        target = whole.after if isinstance(whole, Change) else whole
        allowed = self._allowed(target)
        if least > allowed:
            raise JoinError(why_not(path, whole, parts, least))
        # A clear lead only: rules that differ by rounding (of the whole and of its parts) stay open, in their order.
        rounding = max(allowed / 20, 1.5 * _spacing(target))
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
        branches = _branches(first, len(path))
        if branches is None:
            return self._joined_leaf(path, parts, counts, rules)
        _check_same_keys(path, first, parts)
        joined = {
            key: self._join((*path, key), [_branch(part, key, path) for part in parts], counts)
            for key, _ in branches
        }
        return _rebuilt(first, joined)

    def _joined_leaf(self, path: Path, parts: Sequence[Any], counts: Counts, rules: list[Rule] | None) -> Any:
        if rules is None:
            if same_everywhere(parts):
                return parts[-1]
            self.doubtful.append(name_of(path))
            rules = unseen_rules(parts, counts)
        joined = applied(rules[0], parts, counts, path)
        for other in rules[1:]:
            if relative_error(applied(other, parts, counts, path), joined) > self._allowed(joined) / 4:
                self.doubtful.append(name_of(path))
                break
        return joined


def _spacing(value: Any) -> float:
    """The relative distance of neighbouring numbers of a value's dtype."""
    is_rounded = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return torch.finfo(value.dtype).eps if is_rounded else 0.0


def _own_way(parts: Sequence[Counted], counts: Counts) -> tuple[list[Any], Counts]:
    values, own = [part.value for part in parts], [part.count for part in parts]
    return values, counts if None in own else {"its own": [float(count) for count in own], **counts}


# Structure: what is looked into, and put together again


def _branches(item: Any, depth: int) -> list[tuple[Any, Any]] | None:
    """The named values of a structure; None for a leaf, and below the deepest that is looked into."""
    if isinstance(item, Change) or depth > _DEEPEST:
        return None
    if isinstance(item, Mapping):
        return list(item.items())
    if isinstance(item, (list, tuple)):
        return list(enumerate(item))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [(field.name, getattr(item, field.name)) for field in dataclasses.fields(item)]
    # An object that is equal to itself alone (a model's cache of keys and values) is what its attributes are.
    if (
        type(item).__eq__ is object.__eq__
        and not isinstance(item, (nn.Module, Enum, type))
        and not callable(item)
    ):
        return list(getattr(item, "__dict__", {}).items()) or None
    return None


def _branch(item: Any, key: Any, path: Path) -> Any:
    try:
        return item[key] if isinstance(item, (Mapping, list, tuple)) else getattr(item, key)
    except (LookupError, AttributeError):
        raise JoinError(f"{name_of((*path, key))} is missing in some parts") from None


def _check_same_keys(path: Path, first: Any, parts: Sequence[Any]) -> None:
    wanted = [key for key, _ in _branches(first, len(path)) or ()]
    for part in parts:
        if [key for key, _ in _branches(part, len(path)) or ()] != wanted:
            raise JoinError(f"{name_of(path)} holds other entries in its parts than in the whole")


def _rebuilt(first: Any, joined: dict[Any, Any]) -> Any:
    if isinstance(first, Mapping):
        rebuilt: Any = copy.copy(first)
        for key, value in joined.items():
            rebuilt[key] = value
        return rebuilt
    if isinstance(first, (list, tuple)):
        values = list(joined.values())
        return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)
    rebuilt = copy.copy(first)
    for key, value in joined.items():
        object.__setattr__(rebuilt, key, value)
    return rebuilt


def leaves(item: Any, depth: int = 0) -> Iterator[Any]:
    """Every value within nested mappings, lists, tuples and dataclasses."""
    branches = _branches(item, depth)
    if branches is None:
        yield item
        return
    for _, value in branches:
        yield from leaves(value, depth + 1)

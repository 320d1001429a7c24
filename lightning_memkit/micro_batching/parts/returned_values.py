"""Join what training_step returns besides the loss, as the whole batch would have returned it."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning_memkit.micro_batching import joined
from lightning_memkit.micro_batching.parts.joining import Joining, unlike_pair
from lightning_memkit.micro_batching.parts.joining_rules import (
    ROUNDED,
    Counts,
    JoinError,
    is_one_number,
    same_everywhere,
    ways_of_weighing,
)
from lightning_memkit.micro_batching.parts.loss_names import LossNames

Returned = Mapping[str, Any]


class ReturnedValues:
    """Joins returned values: rows in their order, all others by rules that the probe has confirmed.

    Attributes:
        doubtful: the values of the last `merged` for which the remaining rules differ, or none is known.
        unsure: those for which they agree, after too few comparisons to be certain.
        varying: the numbers that are joined by a rule.
        losses: the names of those that are the loss.
        loss_names: what trials have shown of which values are the loss.
    """

    def __init__(self) -> None:
        self.doubtful: list[str] = []
        self.unsure: list[str] = []
        self.varying: list[str] = []
        self.losses = set[str]()
        self.loss_names = LossNames()
        self._allowed = ROUNDED
        self._given_up: set[str] = set()
        self._joinings: dict[str, Joining] = {}
        self._wrong: set[str] = set()
        self._named: set[str] = set()

    def compare(self, whole: Returned, parts: Sequence[Returned], counts: Counts, allowed: float) -> None:
        """Learn from a small batch that was run whole and in micro-batches.

        Args:
            whole: what it returned as a whole.
            parts: what each of its micro-batches returned.
            counts: the counts of the micro-batches, by each way of weighing.
            allowed: the relative error that counts as rounding.
        """
        self._allowed = allowed
        for name, value in whole.items():
            own = [part[name] for part in parts if name in part]
            if own and len(own) < len(parts):
                continue  # it depends on the rows
            try:
                if not own:
                    raise JoinError(f"{name} is not returned for any micro-batch")
                self._joinings.setdefault(name, Joining(allowed)).compare(value, own, counts)
            except JoinError:
                self._wrong.add(name)

    def compare_whole(
        self,
        whole: Returned,
        parts: Sequence[Returned],
        shares: Sequence[float],
        sizes: Sequence[int],
        allowed: float,
    ) -> None:
        """Learn how numbers add up from a batch that has run in micro-batches, and then as a whole.

        Args:
            whole: what it returned as a whole.
            parts: what each micro-batch returned.
            shares: their weights.
            sizes: their numbers of rows.
            allowed: the relative error that counts as rounding among so many rows.
        """
        for name in dict.fromkeys((*whole, *(name for part in parts for name in part))):
            held = _holders(name, parts)
            values = [parts[index][name] for index in held]
            if not all(map(_is_number, (*values, *([whole[name]] if name in whole else [])))):
                continue
            try:
                if name not in whole or not held:
                    raise JoinError(f"{name} is returned for the whole batch, or for micro-batches, only")
                joining = self._joinings.setdefault(name, Joining(self._allowed))
                joining.compare(whole[name], values, _ways(held, shares, sizes), allowed=allowed)
            except JoinError:
                self._wrong.add(name)

    def merged(
        self,
        returned: Sequence[dict[str, Any]],
        shares: Sequence[float],
        sizes: Sequence[int],
        rows: Sequence[int] | None,
        known: Collection[str] = (),
    ) -> dict[str, Any]:
        """One value for each that the micro-batches returned.

        Args:
            returned: what each micro-batch returned.
            shares: their weights.
            sizes: their numbers of rows.
            rows: the batch's rows that they hold, if these are out of order.
            known: names of values that equal the loss in every micro-batch. Those that trials confirm are in
                `losses`, and the caller joins these itself.
        """
        self.losses = {name for name in known if self.loss_names.trusts(name, sizes)}
        doubtful: list[str] = []
        whole = joined(returned, shares, sizes, rows, doubtful=doubtful)
        self.doubtful, self.unsure, self.varying = [], [], []
        if len(returned) == 1:
            return whole
        for name in [name for name in whole if name not in self.losses]:
            is_doubtful = any(f"{one}.".startswith(f"{name}.") for one in doubtful)
            held = _holders(name, returned)
            parts = [returned[index][name] for index in held]
            is_number = all(map(_is_number, parts))
            try:
                if name in self._wrong or (name not in self._joinings and (is_number or is_doubtful)):
                    raise JoinError(f"no rule gives {name}")
                if name in self._joinings and (rows is None or is_doubtful or is_number):
                    self._by_rule(name, whole, parts, _ways(held, shares, sizes))
            except JoinError:
                if name in self._wrong or (is_doubtful and not is_number):
                    self.warn(name)
                elif is_number and (len(held) < len(returned) or not same_everywhere(parts)):
                    self.doubtful.append(name)
        for name in sorted(self._wrong - whole.keys(), key=str):
            self.warn(name)
        self.doubtful = [name for name in self.doubtful if name not in self._given_up]
        return whole

    def _by_rule(self, name: str, whole: dict[str, Any], parts: Sequence[Any], counts: Counts) -> None:
        """Join a value by its rule.

        Raises:
            JoinError: the rule does not fit.
        """
        joining = self._joinings[name]
        whole[name] = joining.join(parts, counts)
        is_number = all(map(_is_number, parts))
        if is_number and name not in self._given_up:
            self.varying.append(name)
        if joining.excess > 1:
            self.doubtful.append(name)
        elif is_number and not joining.sure and not same_everywhere(parts):
            self.unsure.append(name)

    def telling_pair(
        self,
        returned: Sequence[dict[str, Any]],
        shares: Sequence[float],
        sizes: Sequence[int],
        *,
        adjacent: bool,
        but: Collection[tuple[int, int]],
    ) -> tuple[int, int] | None:
        """Two micro-batches, not in `but`, that distinguish the rules of a doubtful or unsure value."""
        for name in [*self.doubtful, *self.unsure]:
            held = _holders(name, returned)
            counts, parts = _ways(held, shares, sizes), [returned[index][name] for index in held]
            joining = self._joinings.get(name, Joining(self._allowed))
            seen = {(held.index(a), held.index(b)) for a, b in but if a in held and b in held}
            if name in self.doubtful:
                pair = joining.telling_pair(parts, counts, adjacent=adjacent, but=seen)
            else:
                pair = unlike_pair(parts, counts, adjacent=adjacent, but=seen, turn=joining.comparisons)
            if pair is not None:
                return held[pair[0]], held[pair[1]]
        return None

    def learn(
        self, whole: Returned, parts: Sequence[Returned], shares: Sequence[float], sizes: Sequence[int]
    ) -> bool:
        """Compare rows run whole and in micro-batches, for all values in question; whether any was."""
        asked = dict.fromkeys((*self.doubtful, *self.unsure, *self.varying))
        names = [name for name in asked if all(name in one for one in (whole, *parts))]
        counts = ways_of_weighing(shares, sizes)
        for name in names:
            try:
                joining = self._joinings.setdefault(name, Joining(self._allowed))
                joining.compare(whole[name], [part[name] for part in parts], counts)
            except JoinError:
                self._wrong.add(name)
        return bool(names)

    def give_up(self) -> None:
        """Warn of doubtful values, once each."""
        self._given_up.update(self.doubtful)
        for name in self.doubtful:
            warnings.warn(
                f"It is not known how {name!r}, which training_step returns, adds up over a batch's "
                "micro-batches: as a mean over samples, a mean over what the loss counts, or a sum. It may "
                "differ from the whole batch's. Return a tensor of one entry a row instead.",
                stacklevel=2,
            )
        self.doubtful = []

    def warn(self, name: str) -> None:
        """Warn, once for each name, of a value that no rule gives."""
        if name in self._named:
            return
        self._named.add(name)
        warnings.warn(
            f"What training_step returns as {name!r} can't be made from a batch's micro-batches: it is, of those "
            "that return it, all rows, the average, weighed as the loss, or the last one's value. "
            "Return tensors or lists of one entry for each row of the batch, means, or sums.",
            stacklevel=2,
        )


def _is_number(value: Any) -> bool:
    return is_one_number(value) and getattr(value, "ndim", 0) == 0


def _holders(name: str, parts: Sequence[Returned]) -> list[int]:
    """The micro-batches that return a value of this name."""
    return [index for index, part in enumerate(parts) if name in part]


def _ways(held: Sequence[int], shares: Sequence[float], sizes: Sequence[int]) -> dict[str, list[float]]:
    """The counts of some of the micro-batches, by each way of weighing."""
    return ways_of_weighing([shares[index] for index in held], [sizes[index] for index in held])

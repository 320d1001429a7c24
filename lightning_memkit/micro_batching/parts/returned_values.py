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

Returned = Mapping[str, Any]


class ReturnedValues:
    """Joins returned values: rows in their order, all others by rules that the probe has confirmed.

    Attributes:
        doubtful: the values of the last `merged` for which the remaining rules differ, or none is known.
        unsure: those for which they agree, after too few comparisons to be certain.
        varying: the numbers that are joined by a rule.
    """

    def __init__(self) -> None:
        self.doubtful: list[str] = []
        self.unsure: list[str] = []
        self.varying: list[str] = []
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
            try:
                if len(own) != len(parts):
                    raise JoinError(f"{name} is not returned for every micro-batch")
                self._joinings.setdefault(name, Joining(allowed)).compare(value, own, counts)
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
            known: names of values that the caller joins itself.
        """
        doubtful: list[str] = []
        whole = joined(returned, shares, sizes, rows, doubtful=doubtful)
        counts = ways_of_weighing(shares, sizes)
        self.doubtful, self.unsure, self.varying = [], [], []
        for name in whole:
            is_doubtful = any(f"{one}.".startswith(f"{name}.") for one in doubtful)
            parts = [part[name] for part in returned]
            is_number = all(is_one_number(part) and getattr(part, "ndim", 0) == 0 for part in parts)
            if len(returned) == 1 or (rows is not None and not is_doubtful and not is_number):
                continue
            try:
                if name in self._wrong or name not in self._joinings:
                    raise JoinError(f"no rule gives {name}")
                whole[name] = self._joinings[name].join(parts, counts)
                is_told = self._joinings[name].excess <= 1
                few = is_number and not self._joinings[name].sure
                if is_number and name not in (*known, *self._given_up):
                    self.varying.append(name)
                if is_told and few and not same_everywhere(parts):
                    self.unsure.append(name)
            except JoinError:
                is_told = name in self._wrong or not is_number or same_everywhere(parts)
                if is_doubtful or (is_number and name in self._wrong and not same_everywhere(parts)):
                    self._warn(name)
            if not is_told and name not in self._given_up:
                self.doubtful.append(name)
        return whole

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
        counts = ways_of_weighing(shares, sizes)
        for name in [*self.doubtful, *self.unsure]:
            joining, parts = (
                self._joinings.get(name, Joining(self._allowed)),
                [part[name] for part in returned],
            )
            if name in self.doubtful:
                pair = joining.telling_pair(parts, counts, adjacent=adjacent, but=but)
            else:
                pair = unlike_pair(parts, counts, adjacent=adjacent, but=but, turn=joining.comparisons)
            if pair is not None:
                return pair
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

    def _warn(self, name: str) -> None:
        """Warn, once for each name, of a value that no rule gives."""
        if name in self._named:
            return
        self._named.add(name)
        warnings.warn(
            f"What training_step returns as {name!r} can't be made from a batch's micro-batches: it is their "
            "average, weighed as the loss, or the last one's value. "
            "Return tensors or lists of one entry a row, means, or sums.",
            stacklevel=2,
        )

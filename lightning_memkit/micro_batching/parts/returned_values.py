"""What training_step returns beside its loss, as if the whole batch had returned it."""

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
    """Puts returned values together: rows by their place, the rest by rules that the probe has shown to be right.

    Attributes:
        doubtful: the values of the last `merged` of which it is not known how parts make them.
        unsure: those of which it is known from few comparisons.
    """

    def __init__(self) -> None:
        self.doubtful: list[str] = []
        self.unsure: list[str] = []
        self._allowed = ROUNDED
        self._given_up: set[str] = set()
        self._joinings: dict[str, Joining] = {}
        self._wrong: set[str] = set()
        self._named: set[str] = set()

    def compare(self, whole: Returned, parts: Sequence[Returned], counts: Counts, allowed: float) -> None:
        """Learn from a small batch, run whole and in parts.

        Args:
            whole: what it returned as a whole.
            parts: what each of its parts returned.
            counts: ways of weighing, and what each part counts by them.
            allowed: the relative error that is rounding.
        """
        self._allowed = allowed
        for name, value in whole.items():
            own = [part[name] for part in parts if name in part]
            try:
                if len(own) != len(parts):
                    raise JoinError(f"{name} is not returned for every part")
                self._joinings.setdefault(name, Joining(allowed)).compare(value, own, counts)
            except JoinError:
                self._wrong.add(name)

    def merged(
        self,
        returned: Sequence[dict[str, Any]],
        shares: Sequence[float],
        sizes: Sequence[int],
        rows: Sequence[int] | None,
    ) -> dict[str, Any]:
        """One value for each that the parts returned.

        Args:
            returned: what each part returned.
            shares: what each weighs.
            sizes: the rows of each.
            rows: which of the batch's rows they held, where they are out of order.
        """
        doubtful: list[str] = []
        whole = joined(returned, shares, sizes, rows, doubtful=doubtful)
        counts = ways_of_weighing(shares, sizes)
        self.doubtful, self.unsure = [], []
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
        """The places of two parts, not in `but`, that tell how a doubtful or unsure value goes together."""
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
        """Whether rows, run whole and in parts, told more of values that are doubtful, or known from too little."""
        names = [n for n in (*self.doubtful, *self.unsure) if all(n in one for one in (whole, *parts))]
        counts = ways_of_weighing(shares, sizes)
        for name in names:
            try:
                joining = self._joinings.setdefault(name, Joining(self._allowed))
                joining.compare(whole[name], [part[name] for part in parts], counts)
            except JoinError:
                self._wrong.add(name)
        return bool(names)

    def give_up(self) -> None:
        """Warn of what is doubtful, once for each value."""
        self._given_up.update(self.doubtful)
        for name in self.doubtful:
            warnings.warn(
                f"It is not known how what training_step returns as {name!r} comes from a batch's parts: by their "
                "samples, by what the loss counts, as a sum. It may not be the whole batch's. Return a tensor of one "
                "entry a row instead.",
                stacklevel=2,
            )
        self.doubtful = []

    def _warn(self, name: str) -> None:
        """Once for each name."""
        if name in self._named:
            return
        self._named.add(name)
        warnings.warn(
            f"What training_step returns as {name!r} can't be made from a batch's parts: it is an average "
            "of them by the loss, or the last one's. "
            "Return tensors or lists of one entry a row, means, or sums.",
            stacklevel=2,
        )

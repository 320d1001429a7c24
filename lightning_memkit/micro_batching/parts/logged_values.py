"""Join what micro-batches logged into one entry a value, as the whole batch would have logged it."""

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor

from lightning_memkit.micro_batching.parts.joining import Joining, unlike_pair
from lightning_memkit.micro_batching.parts.joining_rules import (
    ROUNDED,
    Counted,
    JoinError,
    is_one_number,
    same_everywhere,
    ways_of_weighing,
)
from lightning_memkit.micro_batching.parts.logged_entries import Entries, Key, by_reduction, counted, keyed
from lightning_memkit.micro_batching.parts.loss_names import LossNames


class LoggedValues:
    """Joins logged values by rules that the probe of the loss has confirmed.

    A value may be a mean over labels, as the loss is, or over samples, as an accuracy is; a sum; an extreme.
    The probe compares what a few samples log as a whole and in micro-batches. If that leaves several rules,
    or a value was in no comparison, the value is listed in `doubtful`: `telling_pair` then finds two
    micro-batches that distinguish the rules, and `learn` takes what these log. Without a rule, a value is
    joined by its `reduce_fx`: a mean is weighed by the user's `batch_size`, else as the loss.

    Attributes:
        doubtful: the values of the last `merged` for which the remaining rules differ, or none is known.
        unsure: those for which they agree, after too few comparisons to be certain.
        varying: those that differ among micro-batches and are joined by a rule.
        losses: hooks and names of those that are the loss.
        loss_names: what trials have shown of which values are the loss.
        seen: the facets of the micro-batches in comparisons, see `facets_of`.
    """

    def __init__(self) -> None:
        self.doubtful: list[Key] = []
        self.unsure: list[Key] = []
        self.varying: list[Key] = []
        self.losses = set[tuple[str, str]]()
        self.loss_names = LossNames()
        self.seen: set[Any] = set()
        self._allowed = ROUNDED
        self._joinings: dict[Key, Joining] = {}
        self._wrong: set[Key] = set()
        self._named = set[tuple[str, str]]()  # of which a warning was given
        self._given_up: set[Key] = set()
        self._said: set[Key] = set()  # means for which the user gives a `batch_size`
        self._constant: set[Key] = set()  # those of which that is the same number for any rows

    def compare(
        self,
        whole: Entries,
        parts: Sequence[Entries],
        shares: Sequence[float],
        sizes: Sequence[int],
        allowed: float,
    ) -> None:
        """Learn from a small batch that was run whole and in micro-batches.

        Args:
            whole: what it logged as a whole.
            parts: what each of its micro-batches logged.
            shares: the weight of each micro-batch in the loss.
            sizes: the samples of each micro-batch.
            allowed: the relative error that counts as rounding.
        """
        self._allowed = allowed
        for key, entry, values in _in_all(whole, parts):
            if entry.count is not None and all(value.count == entry.count for value in values):
                self._constant.add(key)
            joining = self._joinings.setdefault(key, Joining(allowed))
            try:
                joining.compare(entry, values, ways_of_weighing(shares, sizes))
            except JoinError:
                self._wrong.add(key)

    def compare_whole(
        self,
        whole: Entries,
        logged: Sequence[tuple[float, Entries]],
        sizes: Sequence[int],
        allowed: float,
    ) -> None:
        """Learn from a batch that has run in micro-batches, and then as a whole.

        Args:
            whole: what it logged as a whole.
            logged: the weight of each micro-batch, and what it logged.
            sizes: the samples of each micro-batch.
            allowed: the relative error of a number that counts as rounding among so many rows.
        """
        by_part, of_whole = [keyed(entries) for _, entries in logged], keyed(whole)
        for key in dict.fromkeys((*of_whole, *(key for own in by_part for key in own))):
            held = [index for index, own in enumerate(by_part) if key in own]
            if not held:
                self._warn(key)
                continue
            numbers = [by_part[index][key] for index in held]
            if not all(is_one_number(entry["value"]) for entry in (*numbers, of_whole.get(key, numbers[0]))):
                continue
            counts = ways_of_weighing([logged[i][0] for i in held], [sizes[i] for i in held])
            try:
                if key not in of_whole:
                    raise JoinError(f"{key[1]} is not logged for the whole batch")
                joining = self._joinings.setdefault(key, Joining(self._allowed))
                joining.compare(counted(of_whole[key]), [*map(counted, numbers)], counts, allowed=allowed)
            except JoinError:
                self._wrong.add(key)

    def note_loss(self, loss: Tensor, losses_apart: Sequence[Tensor], logged: Entries) -> None:
        """Note which values are the loss, of rows that were run as one; see `LossNames.note`."""
        values = [((entry["fx"], entry["name"]), entry["value"]) for entry in logged]
        self.loss_names.note(loss, losses_apart, values)

    def telling_pair(
        self,
        logged: Sequence[tuple[float, Entries]],
        sizes: Sequence[int],
        *,
        adjacent: bool,
        but: Collection[tuple[int, int]],
    ) -> tuple[int, int] | None:
        """Two micro-batches, not in `but`, that distinguish the rules of a doubtful or unsure value."""
        by_part = [keyed(entries) for _, entries in logged]
        for key in [*self.doubtful, *self.unsure]:
            indices = [index for index, own in enumerate(by_part) if key in own]
            counts = ways_of_weighing([logged[i][0] for i in indices], [sizes[i] for i in indices])
            joining = self._joinings.get(key, Joining(self._allowed))
            values = [counted(by_part[index][key]) for index in indices]
            place = {index: position for position, index in enumerate(indices)}
            seen = {(place[a], place[b]) for a, b in but if a in place and b in place}
            if key in self.doubtful:
                pair = joining.telling_pair(values, counts, adjacent=adjacent, but=seen)
            else:
                numbers = [value.value for value in values]
                pair = unlike_pair(numbers, counts, adjacent=adjacent, but=seen, turn=joining.comparisons)
            if pair is not None:
                return indices[pair[0]], indices[pair[1]]
        return None

    def learn(
        self, whole: Entries, parts: Sequence[Entries], shares: Sequence[float], sizes: Sequence[int]
    ) -> bool:
        """Compare rows run whole and in micro-batches, for all values in question; whether any was."""
        told = False
        for key, entry, values in _in_all(whole, parts):
            if key not in (*self.doubtful, *self.unsure, *self.varying):
                continue
            told = True
            joining = self._joinings.setdefault(key, Joining(self._allowed))
            try:
                joining.compare(entry, values, ways_of_weighing(shares, sizes))
            except JoinError:
                self._wrong.add(key)
        return told

    def give_up(self) -> None:
        """Warn of doubtful values, once each, unless the user's `batch_size` says how to weigh them."""
        for key in self.doubtful:
            self._given_up.add(key)
            if key in self._said:
                continue
            warnings.warn(
                f"It is not known how {key[1]!r}, which {key[0]} logs, adds up over a batch's micro-batches: "
                "as a mean over samples, a mean over what the loss counts, or a sum. The logged value may "
                "differ from the whole batch's. Log a mean with batch_size=, or a torchmetrics object.",
                stacklevel=2,
            )
        self.doubtful = []

    def merged(
        self,
        logged: Sequence[tuple[float, Entries]],
        sizes: Sequence[int],
        known: Collection[tuple[str, str]] = (),
    ) -> Entries:
        """One entry for each value that the micro-batches logged.

        Args:
            logged: the weight of each micro-batch, and what it logged.
            sizes: the samples of each micro-batch.
            known: hooks and names of values that equal the loss in every micro-batch. Those that trials confirm
                are in `losses`; the caller joins these itself: they are never doubtful and cause no warning.
        """
        self.doubtful, self.unsure, self.varying = [], [], []
        self.losses = {name for name in known if self.loss_names.trusts(name, sizes)}
        if len(logged) == 1:
            return [dict(entry) for entry in logged[0][1]]
        grouped: dict[Key, list[int]] = defaultdict(list)
        by_part = [keyed(entries) for _, entries in logged]
        for index, own in enumerate(by_part):
            for key in own:
                grouped[key].append(index)
        return [
            self._one(
                key,
                key[:2] in self.losses,
                [by_part[index][key] for index in indices],
                ways_of_weighing([logged[i][0] for i in indices], [sizes[i] for i in indices]),
            )
            for key, indices in grouped.items()
        ]

    def _one(
        self, key: Key, is_known: bool, entries: Entries, counts: dict[str, list[float]]
    ) -> dict[str, Any]:
        if len(entries) == 1 and (is_known or key not in self._wrong):
            return dict(entries[0])
        joining = self._joinings.get(key)
        if all(entry.get("batch_size") is not None for entry in entries):
            self._said.add(key)
        if key in self._wrong:
            if is_known:
                return by_reduction(entries, counts["loss"], is_constant=key in self._constant)
            self._warn(key)
        elif joining is not None:
            try:
                whole = joining.join([counted(entry) for entry in entries], counts)
            except JoinError:
                return by_reduction(entries, counts["loss"], is_constant=key in self._constant)
            if is_known or key in self._given_up:
                pass
            elif joining.excess > 1:
                self.doubtful.append(key)
            else:
                self.varying.append(key)
                if not joining.sure and _differ(entries):
                    self.unsure.append(key)
            return {**entries[-1], "value": whole.value, "batch_size": whole.count}
        elif not is_known and key not in self._given_up and _differ(entries):
            self.doubtful.append(key)
        return by_reduction(entries, counts["loss"], is_constant=key in self._constant)

    def _warn(self, key: Key) -> None:
        self._wrong.discard(key)
        self._joinings.pop(key, None)
        self._given_up.add(key)
        if key[:2] in self._named:
            return
        self._named.add(key[:2])
        warnings.warn(
            f"What {key[0]} logs as {key[1]!r} can't be made from a batch's micro-batches: the values of those "
            "that log it are reduced by reduce_fx, which gives another value than the whole batch's. Log what adds "
            "up: a mean, a sum, or a torchmetrics object.",
            stacklevel=2,
        )


def _in_all(whole: Entries, parts: Sequence[Entries]) -> Iterator[tuple[Key, Counted, list[Counted]]]:
    """The numbers that both the whole and all micro-batches logged."""
    by_part = [keyed(entries) for entries in parts]
    for key, entry in keyed(whole).items():
        values = [own[key] for own in by_part if key in own]
        if len(values) == len(parts) and all(is_one_number(value["value"]) for value in (entry, *values)):
            yield key, counted(entry), [counted(value) for value in values]


def _differ(entries: Entries) -> bool:
    """Whether micro-batches logged different numbers."""
    values = [entry["value"] for entry in entries]
    return all(map(is_one_number, values)) and not same_everywhere(values)

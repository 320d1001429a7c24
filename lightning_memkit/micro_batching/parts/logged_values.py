"""What the parts of a batch logged, as if the whole batch had been logged once."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_memkit.micro_batching.parts.joining import Joining, unlike_pair
from lightning_memkit.micro_batching.parts.joining_rules import (
    ROUNDED,
    Counted,
    JoinError,
    applied,
    is_one_number,
    same_everywhere,
    ways_of_weighing,
)

Entries = list[dict[str, Any]]  # the keywords of each call of `self.log`
_Key = tuple[str, str, int]


class LoggedValues:
    """Puts logged values together by rules that the probe of the loss has shown to be right.

    A value may be a mean over labels, as the loss is, or over samples, as an accuracy is; a sum; an extreme. The
    probe compares what a few samples log, whole and in parts. Where that does not tell, or a value was in no
    comparison, `doubtful` says so: two parts that do are found by `telling_pair`, and `learn` is given what they log.
    Without, a value is put together by its reduction: means by the user's `batch_size`, else as the loss is weighed.

    Attributes:
        doubtful: the values of the last `merged` of which it is not known how parts make them.
        unsure: those of which it is known from few comparisons.
    """

    def __init__(self) -> None:
        self.doubtful: list[_Key] = []
        self.unsure: list[_Key] = []
        self._allowed = ROUNDED
        self._joinings: dict[_Key, Joining] = {}
        self._wrong: set[_Key] = set()
        self._given_up: set[_Key] = set()
        self._said: set[_Key] = set()  # means of which the user says what over, by `batch_size`

    def compare(
        self,
        whole: Entries,
        parts: Sequence[Entries],
        shares: Sequence[float],
        sizes: Sequence[int],
        allowed: float,
    ) -> None:
        """Learn from a small batch, run whole and in parts.

        Args:
            whole: what it logged as a whole.
            parts: what each of its parts logged.
            shares: what each part holds of what the loss is a mean over.
            sizes: the samples of each part.
            allowed: the relative error that is rounding.
        """
        self._allowed = allowed
        for key, entry, values in _in_all(whole, parts):
            joining = self._joinings.setdefault(key, Joining(allowed))
            try:
                joining.compare(entry, values, ways_of_weighing(shares, sizes))
            except JoinError:
                self._wrong.add(key)

    def telling_pair(
        self,
        logged: Sequence[tuple[float, Entries]],
        sizes: Sequence[int],
        *,
        adjacent: bool,
        but: Collection[tuple[int, int]],
    ) -> tuple[int, int] | None:
        """The places of two parts, not in `but`, that tell how a doubtful or unsure value goes together."""
        by_part = [_keyed(entries) for _, entries in logged]
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
        """Whether rows, run whole and in parts, told more of values that are doubtful, or known from too little."""
        told = False
        for key, entry, values in _in_all(whole, parts):
            if key not in self.doubtful and key not in self.unsure:
                continue
            told = True
            joining = self._joinings.setdefault(key, Joining(self._allowed))
            try:
                joining.compare(entry, values, ways_of_weighing(shares, sizes))
            except JoinError:
                self._wrong.add(key)
        return told

    def give_up(self) -> None:
        """Warn of what is doubtful, once for each value; not where the user's `batch_size` says what it is."""
        for key in self.doubtful:
            self._given_up.add(key)
            if key in self._said:
                continue
            warnings.warn(
                f"It is not known how what {key[0]} logs as {key[1]!r} comes from a batch's parts: by their samples, "
                "by what the loss counts, as a sum. What is logged may not be the whole batch's. To say it, log a "
                "mean with batch_size=, or a torchmetrics object.",
                stacklevel=2,
            )
        self.doubtful = []

    def merged(
        self,
        logged: Sequence[tuple[float, Entries]],
        sizes: Sequence[int],
        known: Container[tuple[str, str]] = (),
    ) -> Entries:
        """One entry for each value that the parts logged.

        Args:
            logged: the weight of each part, and what it logged.
            sizes: the samples of each part.
            known: hooks and names of values that the caller puts together: nothing is said of them.
        """
        self.doubtful, self.unsure = [], []
        grouped: dict[_Key, list[int]] = defaultdict(list)
        by_part = [_keyed(entries) for _, entries in logged]
        for index, own in enumerate(by_part):
            for key in own:
                grouped[key].append(index)
        return [
            self._one(
                key,
                key[:2] in known,
                [by_part[index][key] for index in indices],
                ways_of_weighing([logged[i][0] for i in indices], [sizes[i] for i in indices]),
            )
            for key, indices in grouped.items()
        ]

    def _one(
        self, key: _Key, is_known: bool, entries: Entries, counts: dict[str, list[float]]
    ) -> dict[str, Any]:
        if len(entries) == 1:
            return dict(entries[0])
        joining = self._joinings.get(key)
        if all(entry.get("batch_size") is not None for entry in entries):
            self._said.add(key)
        if key in self._wrong:
            if is_known:
                return _by_reduction(entries, counts["loss"])
            self._warn(key)
        elif joining is not None:
            try:
                whole = joining.join([counted(entry) for entry in entries], counts)
            except JoinError:
                return _by_reduction(entries, counts["loss"])
            if joining.excess > 1 and not is_known and key not in self._given_up:
                self.doubtful.append(key)
            elif not joining.sure and not is_known and _differ(entries):
                self.unsure.append(key)
            return {**entries[-1], "value": whole.value, "batch_size": whole.count}
        elif not is_known and key not in self._given_up and _differ(entries):
            self.doubtful.append(key)
        return _by_reduction(entries, counts["loss"])

    def _warn(self, key: _Key) -> None:
        self._wrong.discard(key)
        self._joinings.pop(key, None)
        self._given_up.add(key)
        warnings.warn(
            f"What {key[0]} logs as {key[1]!r} can't be made from a batch's parts: in parts it is their "
            "reduction (reduce_fx), which is another value than the whole batch's. Log what adds up: a mean, a sum, "
            "or a torchmetrics object.",
            stacklevel=2,
        )


def _in_all(whole: Entries, parts: Sequence[Entries]) -> Iterator[tuple[_Key, Counted, list[Counted]]]:
    """The numbers that the whole and all parts logged."""
    by_part = [_keyed(entries) for entries in parts]
    for key, entry in _keyed(whole).items():
        values = [own[key] for own in by_part if key in own]
        if len(values) == len(parts) and all(is_one_number(value["value"]) for value in (entry, *values)):
            yield key, counted(entry), [counted(value) for value in values]


def _differ(entries: Entries) -> bool:
    """Whether parts logged unlike numbers."""
    values = [entry["value"] for entry in entries]
    return all(map(is_one_number, values)) and not same_everywhere(values)


def _keyed(entries: Iterable[dict[str, Any]]) -> dict[_Key, dict[str, Any]]:
    """The calls by hook, name, and which of several calls of that name it is."""
    found: dict[_Key, dict[str, Any]] = {}
    seen: dict[tuple[str, str], int] = defaultdict(int)
    for entry in entries:
        name = (entry["fx"], entry["name"])
        found[(*name, seen[name])] = entry
        seen[name] += 1
    return found


def counted(entry: dict[str, Any]) -> Counted:
    """A held call of `self.log` as what its value is joined by."""
    return Counted(value=entry["value"], count=entry.get("batch_size"), rule=_reduction(entry))


def _reduction(entry: dict[str, Any]) -> str:
    reduction: Any = entry.get("reduce_fx", "mean")
    name = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "")
    return {"avg": "mean", "amax": "max", "amin": "min"}.get(name, name)


def _by_reduction(entries: Entries, weights: Sequence[float]) -> dict[str, Any]:
    """Means are averaged by the user's batch_size, else by the loss's weights; sums add, extremes stay."""
    merged = dict(entries[-1])
    values = [entry["value"] for entry in entries]
    if not all(isinstance(value, Tensor) for value in values):
        return merged
    reduction: Any = merged.get("reduce_fx", "mean")
    name = _reduction(merged)
    stacked = torch.stack([value.detach() for value in values])
    if name == "sum":
        merged["value"] = stacked.sum(0)
    elif name in ("max", "min"):
        merged["value"] = stacked.max() if name == "max" else stacked.min()
    elif name == "mean":
        own = [size for entry in entries if (size := entry.get("batch_size")) is not None]
        given = len(own) == len(entries)
        used = [float(size) for size in own] if given else list(weights)
        scaled = values if stacked.is_floating_point() else list(stacked.float())
        merged["value"] = applied(("mean", "used"), scaled, {"used": used}, ())
        merged["batch_size"] = sum(own) if given else None
    else:
        merged["value"] = cast(Callable[[Tensor], Tensor], reduction)(stacked)
    return merged

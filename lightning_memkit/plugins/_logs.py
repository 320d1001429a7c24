"""What the parts of a batch logged, as if the whole batch had been logged once."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_memkit.joining import Joining
from lightning_memkit.joining_rules import Counted, JoinError, applied

Entries = list[dict[str, Any]]  # the keywords of each call of `self.log`
_Key = tuple[str, str, int]


class LoggedValues:
    """Puts logged values together by rules that the probe of the loss has shown to be right.

    A value may be a mean over labels, as the loss is, or over samples, as an accuracy is; a sum; an extreme. The
    probe compares what a few samples log, whole and in parts. A value that was in no comparison is put together by
    its reduction: means by the user's `batch_size`, else as the loss is weighed.
    """

    def __init__(self) -> None:
        self._joinings: dict[_Key, Joining] = {}
        self._wrong: set[_Key] = set()

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
        by_part = [_keyed(entries) for entries in parts]
        for key, entry in _keyed(whole).items():
            values = [own[key] for own in by_part if key in own]
            if len(values) != len(parts) or not all(_is_number(value["value"]) for value in (entry, *values)):
                continue
            counts = {"loss": list(shares), "samples": [float(size) for size in sizes]}
            joining = self._joinings.setdefault(key, Joining(allowed))
            try:
                joining.compare(counted(entry), [counted(value) for value in values], counts)
            except JoinError:
                self._wrong.add(key)

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
        counted = [index for index, (weight, _) in enumerate(logged) if weight > 0] or range(len(logged))
        grouped: dict[_Key, list[int]] = defaultdict(list)
        by_part = [_keyed(entries) for _, entries in logged]
        for index in counted:
            for key in by_part[index]:
                grouped[key].append(index)
        return [
            self._one(
                key,
                key[:2] in known,
                [by_part[index][key] for index in indices],
                {"loss": [logged[i][0] for i in indices], "samples": [float(sizes[i]) for i in indices]},
            )
            for key, indices in grouped.items()
        ]

    def _one(
        self, key: _Key, is_known: bool, entries: Entries, counts: dict[str, list[float]]
    ) -> dict[str, Any]:
        if len(entries) == 1:
            return dict(entries[0])
        joining = self._joinings.get(key)
        if key in self._wrong:
            if is_known:
                return _by_reduction(entries, counts["loss"])
            self._warn(key)
        elif joining is not None:
            try:
                whole = joining.join([counted(entry) for entry in entries], counts)
            except JoinError:
                return _by_reduction(entries, counts["loss"])
            return {**entries[-1], "value": whole.value, "batch_size": whole.count}
        return _by_reduction(entries, counts["loss"])

    def _warn(self, key: _Key) -> None:
        self._wrong.discard(key)
        self._joinings.pop(key, None)
        warnings.warn(
            f"What {key[0]} logs as {key[1]!r} can't be made from a batch's parts: in parts it is their "
            "reduction (reduce_fx), which is another value than the whole batch's. Log what adds up: a mean, a sum, "
            "or a torchmetrics object.",
            stacklevel=2,
        )


def _keyed(entries: Iterable[dict[str, Any]]) -> dict[_Key, dict[str, Any]]:
    """The calls by hook, name, and which of several calls of that name it is."""
    found: dict[_Key, dict[str, Any]] = {}
    seen: dict[tuple[str, str], int] = defaultdict(int)
    for entry in entries:
        name = (entry["fx"], entry["name"])
        found[(*name, seen[name])] = entry
        seen[name] += 1
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


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

"""Collected calls of `self.log`: by hook and name, as `Joining` takes them, and joined by their `reduce_fx`."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightning_memkit.micro_batching.parts.joining_rules import Counted, applied

Entries = list[dict[str, Any]]  # the keyword arguments of each call of `self.log`
Key = tuple[str, str, int]


def keyed(entries: Iterable[dict[str, Any]]) -> dict[Key, dict[str, Any]]:
    """The calls by hook, name, and the index among the calls of that name."""
    found: dict[Key, dict[str, Any]] = {}
    seen: dict[tuple[str, str], int] = defaultdict(int)
    for entry in entries:
        name = (entry["fx"], entry["name"])
        found[(*name, seen[name])] = entry
        seen[name] += 1
    return found


def counted(entry: dict[str, Any]) -> Counted:
    """A collected call of `self.log` in the form that `Joining` takes."""
    return Counted(value=entry["value"], count=entry.get("batch_size"), rule=_reduction(entry))


def _reduction(entry: dict[str, Any]) -> str:
    reduction: Any = entry.get("reduce_fx", "mean")
    name = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "")
    return {"avg": "mean", "amax": "max", "amin": "min"}.get(name, name)


def by_reduction(entries: Entries, weights: Sequence[float], *, is_constant: bool) -> dict[str, Any]:
    """Join by `reduce_fx`: means are weighed by the user's `batch_size`, else as the loss; sums add up.

    A `batch_size` that is the same for any rows (`is_constant`) weighs no micro-batch, and the batch's is no sum.
    """
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
        given = len(own) == len(entries) and not is_constant
        used = [float(size) for size in own] if given else list(weights)
        scaled = values if stacked.is_floating_point() else list(stacked.float())
        merged["value"] = applied(("mean", "used"), scaled, {"used": used}, ())
        merged["batch_size"] = sum(own) if given else merged.get("batch_size") if is_constant else None
    else:
        merged["value"] = cast(Callable[[Tensor], Tensor], reduction)(stacked)
    return merged

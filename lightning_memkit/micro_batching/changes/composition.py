"""Compare the state that micro-batches, run in sequence, leave in a module with the whole batch's."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memkit.micro_batching.changes.alike import alike
from lightning_memkit.micro_batching.changes.kept_state import Kept, KeptDict, KeptItems
from lightning_memkit.micro_batching.changes.kept_tensor import KeptTensor
from lightning_memkit.micro_batching.changes.step_changes import StepChange

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}

Left = dict[StepChange, list[tuple[int, Any, Any]]]


def left_behind(entries: Sequence[Kept | KeptTensor]) -> Left:
    """For each change of a step, the values before and after it, the latter as copies.

    For a list that only grew, the value after is the items that it gained. Of a metric its states count, and what is
    not private, but not its number of updates or cached results.
    """
    left: Left = {}
    metrics = {one.place.path: one for one in entries if isinstance(one, KeptDict) and one.is_metric}
    kept = {one.place.key: one for one in entries if isinstance(one, (KeptTensor, KeptItems))}
    for entry in entries:
        metric = metrics.get(entry.place.path) if entry.place.kind == "metric" else None
        for change in entry.changes():
            values = left.setdefault(change, [])
            if metric is not None and change.kind == "metric":
                if all(key != id(metric) for key, *_ in values):
                    before, now = _states(metric, kept)
                    values.append((id(metric), before, _copied(now)))
                is_state = entry is metric or entry.place.name in metric.owner["_defaults"]
                if is_state:
                    continue
            if any(key == id(entry) for key, *_ in values):
                continue  # all states of a metric make one change: take each snapshot once
            if change.kind != "metric" or not entry.place.name.startswith("_"):
                now = _copied(entry.now(change))
                values.append((id(entry), entry.before(now), now))
    return left


def _states(metric: KeptDict, kept: Mapping[tuple[str, str], Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A metric's states that have changed, before and after; of lists, the items that they gained.

    By name: a call may write to a state, and then put a copy in its place.
    """
    before, now = dict[str, Any](), dict[str, Any]()
    for name, value in metric.owner.items():
        if name.startswith("_") or (name not in metric.owner["_defaults"] and callable(value)):
            continue
        of_state = kept.get((metric.place.path, name))
        if isinstance(of_state, KeptItems) and isinstance(value, list):
            if len(value) != len(of_state.items):
                now[name] = value[len(of_state.items) :] if len(value) > len(of_state.items) else list(value)
        else:
            was = metric.items.get(name) if of_state is None else of_state.before(value)
            if not alike(was, value):
                before[name], now[name] = was, value
    return before, now


def compose(whole: Left, parts: Left) -> frozenset[StepChange]:
    """The changes that micro-batches leave as the whole batch does, up to rounding; of lists, all rows in order."""
    return frozenset(change for change, values in whole.items() if _match(values, parts.get(change)))


def _match(whole: list[tuple[int, Any, Any]], parts: list[tuple[int, Any, Any]] | None) -> bool:
    if parts is None or [key for key, *_ in whole] != [key for key, *_ in parts]:
        return False
    return all(_close(a, b, before) for (_, before, a), (_, _, b) in zip(whole, parts, strict=True))


def _copied(value: Any, depth: int = 0) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if depth < 4 and isinstance(value, dict):
        return {key: _copied(item, depth + 1) for key, item in value.items()}
    if depth < 4 and isinstance(value, (list, tuple, deque)):
        return [_copied(item, depth + 1) for item in value]
    return value


def _close(a: Any, b: Any, before: Any) -> bool:
    """Whether two values differ from `before` by the same change, up to rounding; lists compare by rows."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.dtype == object:
            return False
        before = torch.from_numpy(before) if isinstance(before, np.ndarray) else None
        return _tensors_close(torch.from_numpy(a), torch.from_numpy(b), before)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _tensors_close(a, b, before)
    if isinstance(a, float) and isinstance(b, float):
        first, second = (torch.tensor(value, dtype=torch.float64) for value in (a, b))
        start = torch.tensor(before, dtype=torch.float64) if isinstance(before, (int, float)) else None
        return _within(first, second, start, 1e-5)  # a float may be computed from float32 tensors
    if isinstance(a, list) and isinstance(b, list):
        return _lists_close(a, b, before)
    if isinstance(a, dict) and isinstance(b, dict):
        known = before if isinstance(before, dict) else {}
        return a.keys() == b.keys() and all(_close(a[key], b[key], known.get(key)) for key in a)
    return alike(a, b)


def _tensors_close(a: Tensor, b: Tensor, before: Any) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    known = before if isinstance(before, Tensor) and before.shape == a.shape else None
    return _within(a, b, None if known is None else known.to(a), _ROUNDING.get(a.dtype, 1e-4))


def _within(a: Tensor, b: Tensor, before: Tensor | None, allowed: float) -> bool:
    """Whether two values differ little compared to the change; False if the change itself is rounding.

    Compared to the value, too: from a start of 1e9 or infinity, the change to a first loss is the same for any loss.
    """
    if before is not None and not before.isfinite().all():
        before = None
    change, value = a if before is None else a - before, a.nan_to_num().norm()
    size, noise = change.nan_to_num().norm(), 100 * torch.finfo(a.dtype).eps * value
    if before is not None and size <= noise:
        return False
    close = (a.nan_to_num() - b.nan_to_num()).norm() <= allowed * torch.minimum(size, value)
    return bool(close) and torch.equal(a.isnan(), b.isnan())


def _lists_close(a: list[Any], b: list[Any], before: Any) -> bool:
    tensors = [*a, *b]
    if a and b and all(isinstance(item, Tensor) and item.ndim > 0 for item in tensors):
        shapes = {(item.shape[1:], item.dtype) for item in tensors}
        return len(shapes) == 1 and _tensors_close(torch.cat(a), torch.cat(b), None)
    known = before if isinstance(before, list) and len(before) == len(a) else [None] * len(a)
    return len(a) == len(b) and all(_close(x, y, z) for x, y, z in zip(a, b, known, strict=True))

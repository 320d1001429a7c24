"""Rules by which one value of a whole batch is computed from its micro-batches' values, for `joining`."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Path = tuple[Any, ...]
Rule = tuple[Any, ...]  # its kind, then its options
Counts = Mapping[str, Sequence[float]]  # by what a mean may be weighed, and each micro-batch's count of it

ROUNDED = 1e-5  # relative difference of logged and returned numbers that counts as rounding
_NUMBERS = (bool, int, float)
# Perplexities are exponentials of means, root mean squares are roots of them.
_POWER_MEANS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "geometric mean": (torch.log, torch.exp),
    "quadratic mean": (torch.square, torch.sqrt),
}
ROUNDING = {torch.float64: 0.0, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


class JoinError(ValueError):
    """No rule computes the whole batch's value from the micro-batches'; says which value and why."""


@dataclass(frozen=True, kw_only=True)
class Counted:
    """A logged value with the count by which its user weighs it (`batch_size=` of `self.log`), or None.

    `rule` is the kind of rule that the user asks for (`reduce_fx=`); it is preferred as long as comparisons
    agree.
    """

    value: Any
    count: Any
    rule: str = ""


def ways_of_weighing(shares: Sequence[float], sizes: Sequence[int]) -> dict[str, list[float]]:
    """The weights by which a value may be a mean: the micro-batches' counts in the loss, or their samples."""
    return {"loss": list(shares), "samples": [float(size) for size in sizes]}


def name_of(path: Path) -> str:
    """A value's path in the results, as its user would write it."""
    return "".join(f"[{key!r}]" if index else str(key) for index, key in enumerate(path)) or "the result"


def rules_for(whole: Any, parts: Sequence[Any], counts: Counts) -> list[Rule]:
    """Rules whose result has the shape of the whole batch's value, the likeliest first."""
    if not is_number_like(whole) or not all(is_number_like(part) for part in parts):
        return [("same",)]
    target, values = _tensor(whole), [_tensor(part) for part in parts]
    rules: list[Rule] = [("cat", dim) for dim in range(min(target.ndim, 3)) if _fits(values, dim, target)]
    if any(value.shape != target.shape for value in values):
        return rules
    extremes: list[Rule] = [] if target.is_complex() else [("max",), ("min",)]
    if target.is_floating_point() or target.is_complex():
        means = [("mean", way) for way in counts] + [(mean, way) for mean in _POWER_MEANS for way in counts]
        return [*rules, *means, ("same",), ("sum",), *extremes]
    return [*rules, *([] if target.dtype is torch.bool else [("sum",)]), ("same",), *extremes]


def unseen_rules(parts: Sequence[Any], counts: Counts) -> list[Rule]:
    """The likeliest rule of a value that was in no comparison: rows, else the first of `rules_for`."""
    if all(isinstance(part, (Tensor, np.ndarray)) and part.ndim for part in parts):
        rows = [part.shape[0] for part in parts]
        if rows == list(counts.get("samples", ())):
            return [("cat", 0)]
    return rules_for(parts[0], parts, counts)[:1] or [("same",)]


def _fits(values: Sequence[Tensor], dim: int, whole: Tensor | None = None) -> bool:
    """Whether tensors can be concatenated along a dimension, to the shape of `whole` if that is given."""
    shapes = {(*value.shape[:dim], *value.shape[dim + 1 :]) for value in values if value.ndim > dim}
    if len(shapes) != 1 or any(value.ndim <= dim for value in values):
        return False
    if whole is None:
        return True
    length = sum(value.shape[dim] for value in values)
    return (*whole.shape[:dim], *whole.shape[dim + 1 :]) in shapes and whole.shape[dim] == length


def rule_error(rule: Rule, whole: Any, parts: Sequence[Any], counts: Counts) -> float:
    """The relative error of a rule's result against the whole batch's value."""
    if rule[-1] == "same":  # all have to be equal, though only the last one's is returned
        return max(relative_error(part, whole) for part in parts)
    return relative_error(applied(rule, parts, counts, ()), whole)


def applied(rule: Rule, parts: Sequence[Any], counts: Counts, path: Path) -> Any:
    """Apply a rule to the micro-batches' values."""
    kind, *options = rule
    if kind in ("mean", *_POWER_MEANS) and options[0] not in counts:
        raise JoinError(f"{name_of(path)} is a mean over {options[0]}, which this batch does not tell")
    if kind == "same":
        return parts[-1]
    if not all(map(is_number_like, parts)):
        raise JoinError(f"{name_of(path)} is no number in some micro-batches")
    values = [_tensor(part) for part in parts]
    if kind == "cat":
        if not _fits(values, options[0]):
            shapes = ", ".join(str(tuple(value.shape)) for value in values)
            raise JoinError(
                f"{name_of(path)} has in micro-batches the shapes {shapes}, which don't go together"
            )
        return _like(parts[0], torch.cat(values, dim=options[0]))
    if len({value.shape for value in values}) > 1:
        raise JoinError(f"{name_of(path)} has different shapes in micro-batches")
    if kind == "mean":
        return _like(parts[0], _mean(values, counts[options[0]]))
    if kind in _POWER_MEANS:
        to, back = _POWER_MEANS[kind]
        wide = [to(value if value.device.type == "mps" else value.double()) for value in values]
        return _like(parts[0], back(_mean(wide, counts[options[0]])))
    stacked = torch.stack(values)
    reduced = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[kind](stacked, 0)
    return _like(parts[0], reduced.to(values[0].dtype))


def _mean(values: Sequence[Tensor], counts: Sequence[float]) -> Tensor:
    """The mean weighed by counts, without micro-batches of count 0, whose own mean may be nan."""
    total = sum(counts)
    if total == 0:
        return values[0]
    dtype = values[0].dtype
    # In float64 a mean of equal values is exactly that value; Apple's GPUs have no float64.
    wide = torch.promote_types(dtype, torch.float32 if values[0].device.type == "mps" else torch.float64)
    weighed = [value.to(wide) * (count / total) for value, count in zip(values, counts, strict=True) if count]
    return torch.stack(weighed).sum(0).to(dtype)


# Values as tensors


def is_number_like(item: Any) -> bool:
    """Whether a value is a number, a tensor or an array of numbers."""
    if isinstance(item, np.ndarray):
        return item.dtype.kind in "biufc"
    return isinstance(item, Tensor) or isinstance(item, (*_NUMBERS, np.number))


def is_one_number(item: Any) -> bool:
    """Whether a value is a single number: Python's, or a tensor of one element."""
    return isinstance(item, (int, float)) or (isinstance(item, Tensor) and item.numel() == 1)


def _tensor(item: Any) -> Tensor:
    if isinstance(item, Tensor):
        return item.detach()
    return torch.tensor(item, dtype=torch.float64) if isinstance(item, float) else torch.as_tensor(item)


def _like(example: Any, value: Tensor) -> Any:
    """Convert a value to the type of `example`, the user's own value."""
    if isinstance(example, Tensor):
        return value.to(example.dtype)
    if isinstance(example, np.ndarray):
        return value.numpy().astype(example.dtype)
    return type(example)(value.item())


def same(a: Any, b: Any) -> bool:
    """Whether two values that are not numbers are equal."""
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return False


def same_everywhere(parts: Sequence[Any]) -> bool:
    """Whether all micro-batches gave the same value."""
    first = parts[0]
    if is_number_like(first):
        return all(is_number_like(part) and relative_error(part, first) == 0 for part in parts)
    return all(same(part, first) for part in parts)


def relative_error(value: Any, target: Any) -> float:
    """The distance of a value from its target over the target's norm; infinite if shapes differ."""
    if not (is_number_like(value) and is_number_like(target)):
        return 0.0 if same(value, target) else float("inf")
    a, b = _tensor(value), _tensor(target)
    if not a.ndim and not b.ndim and not a.is_complex() and not b.is_complex():
        return _error_of_numbers(float(a), float(b))
    if a.shape != b.shape or a.layout is not b.layout:
        return float("inf")
    if b.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to("cpu", wide), b.to("cpu", wide)
    alike = (a == b) | (a.isnan() & b.isnan())  # nan and infinities agree if both values have them
    distance = torch.where(alike, torch.zeros_like(a), a - b).norm()
    norm = torch.where(b.isfinite(), b, torch.zeros_like(b)).norm().clamp_min(1e-300)
    error = float(distance / norm)
    return error if error == error else float("inf")


def _error_of_numbers(value: float, target: float) -> float:
    if value == target or (value != value and target != target):
        return 0.0
    error = abs(value - target) / max(abs(target) if math.isfinite(target) else 0.0, 1e-300)
    return error if error == error else float("inf")


def why_not(path: Path, whole: Any, parts: Sequence[Any], error: float) -> str:
    """Describe why no rule gives a value; `error` is the relative error of the best rule."""
    name = name_of(path)
    if isinstance(whole, Tensor) and whole.ndim:
        shapes = " and ".join(
            str(tuple(p.shape)) if isinstance(p, Tensor) else type(p).__name__ for p in parts
        )
        if error < float("inf"):
            return f"{name} of a few samples is not that of their micro-batches: it is {error:.1e} off at the least"
        return (
            f"{name} of shape {tuple(whole.shape)} does not come from its micro-batches', of shapes {shapes}"
        )
    if not is_number_like(whole) and all(type(part) is type(whole) for part in parts):
        return f"{name_of(path)} ({type(whole).__name__}) is not the same in all micro-batches, and no rule joins it"
    shown = ", ".join(_shown(part) for part in parts)
    return (
        f"{name_of(path)} is {_shown(whole)} for a few samples at once, and {shown} for their micro-batches"
    )


def _shown(item: Any) -> str:
    if is_number_like(item) and _tensor(item).numel() == 1:
        return f"{_tensor(item).item():.6g}"
    return type(item).__name__

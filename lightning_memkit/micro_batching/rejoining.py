"""What micro-batches gave, as one for the whole batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def joined(
    outputs: Sequence[Any],
    weights: Sequence[float],
    sizes: Sequence[int],
    rows: Sequence[int] | None = None,
    *,
    doubtful: list[str] | None = None,
    name: str = "",
) -> Any:
    """One output from the parts': rows and lists of one entry a row concatenated, floats averaged by weight.

    What all parts have alike stays. Of the rest (counts, lists of another length, other objects) the last part's is
    returned, which is not what the whole batch would have given.

    Args:
        outputs: what each part gave.
        weights: what each part weighs.
        sizes: the rows of each part.
        rows: which of the batch's rows the parts held, where they are out of order; they come back in order.
        doubtful: the names of the values that are the last part's are added to it.
        name: where the outputs are from, for these names.
    """
    first = outputs[0]
    if len(outputs) == 1 and rows is None:
        return first
    if isinstance(first, Tensor) and all(isinstance(out, Tensor) for out in outputs):
        if first.ndim > 0 and all(out.shape[:1] == (size,) for out, size in zip(outputs, sizes, strict=True)):
            whole = torch.cat(list(outputs))
            return whole if rows is None else whole[torch.tensor(rows, device=whole.device).argsort()]
        if first.ndim == 0 and first.is_floating_point():
            # A part that counts nothing may have a mean over nothing: nan.
            weighed = [out * weight for out, weight in zip(outputs, weights, strict=True) if weight]
            return sum(weighed[1:], start=weighed[0]) if weighed else first
    elif isinstance(first, Mapping) and all(isinstance(out, Mapping) for out in outputs):
        common = [key for key in first if all(key in out for out in outputs)]
        if doubtful is not None:
            doubtful += [_within(name, key) for out in outputs for key in out if key not in common]
            doubtful[:] = dict.fromkeys(doubtful)
        return {
            key: joined(
                [out[key] for out in outputs],
                weights,
                sizes,
                rows,
                doubtful=doubtful,
                name=_within(name, key),
            )
            for key in common
        }
    elif type(first) in (list, tuple) and all(type(out) is type(first) for out in outputs):
        if all(len(out) == size for out, size in zip(outputs, sizes, strict=True)):
            if doubtful is not None and len(outputs) > 1 and all(_same(first, out) for out in outputs[1:]):
                doubtful.append(
                    name or type(first).__name__
                )  # a list that is always the same, or one entry a row
            entries = [entry for out in outputs for entry in out]
            if rows is not None:
                entries = [
                    entry for _, entry in sorted(zip(rows, entries, strict=True), key=lambda pair: pair[0])
                ]
            return tuple(entries) if isinstance(first, tuple) else entries
    if doubtful is not None and not all(_same(first, out) for out in outputs[1:]):
        doubtful.append(name or type(first).__name__)
    return outputs[-1]


def _within(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _same(one: Any, other: Any) -> bool:
    """Whether two values are alike; of objects that can't be compared, whether they are one."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False

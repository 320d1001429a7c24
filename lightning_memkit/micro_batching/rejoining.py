"""Join the outputs of micro-batches into one output for the whole batch."""

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
    """Join outputs: concatenate tensors and lists that have one entry a row, sum float scalars times their weights.

    A value that is the same in all micro-batches is kept. Of any other (counts, lists of another length,
    other objects) the last micro-batch's is returned, which may differ from what the whole batch would have
    given. An entry of a mapping that only some micro-batches have is joined from these.

    Args:
        outputs: the output of each micro-batch.
        weights: the weight of each micro-batch.
        sizes: the rows of each micro-batch.
        rows: the batch's rows that the micro-batches hold, if they are out of order; the result is in order.
        doubtful: a list to which the names of values are appended that are the last micro-batch's, or that some
            micro-batches don't have.
        name: a prefix for these names.
    """
    first = outputs[0]
    if len(outputs) == 1 and rows is None:
        return first
    if isinstance(first, Tensor) and all(isinstance(out, Tensor) for out in outputs):
        if first.ndim > 0 and all(out.shape[:1] == (size,) for out, size in zip(outputs, sizes, strict=True)):
            whole = torch.cat(list(outputs))
            return whole if rows is None else whole[torch.tensor(rows, device=whole.device).argsort()]
        if first.ndim == 0 and first.is_floating_point():
            # A micro-batch of weight 0 may have a mean over nothing, and 0 times nan is nan: leave it out.
            weighed = [out * weight for out, weight in zip(outputs, weights, strict=True) if weight]
            return sum(weighed[1:], start=weighed[0]) if weighed else first
    elif isinstance(first, Mapping) and all(isinstance(out, Mapping) for out in outputs):
        return {
            key: _joined_entry(key, outputs, weights, sizes, rows, (doubtful, name))
            for key in dict.fromkeys(key for out in outputs for key in out)
        }
    elif type(first) in (list, tuple) and all(type(out) is type(first) for out in outputs):
        if all(len(out) == size for out, size in zip(outputs, sizes, strict=True)):
            if doubtful is not None and len(outputs) > 1 and all(_same(first, out) for out in outputs[1:]):
                doubtful.append(
                    name or type(first).__name__
                )  # it can't be told whether this is one entry a row, or a list that is always the same
            entries = [entry for out in outputs for entry in out]
            if rows is not None:
                entries = [
                    entry for _, entry in sorted(zip(rows, entries, strict=True), key=lambda pair: pair[0])
                ]
            return tuple(entries) if isinstance(first, tuple) else entries
    if doubtful is not None and not all(_same(first, out) for out in outputs[1:]):
        doubtful.append(name or type(first).__name__)
    return outputs[-1]


def _joined_entry(
    key: Any,
    outputs: Sequence[Mapping[Any, Any]],
    weights: Sequence[float],
    sizes: Sequence[int],
    rows: Sequence[int] | None,
    named: tuple[list[str] | None, str],
) -> Any:
    """Join an entry of those mappings that have it; `named` is `doubtful` and the mapping's own name."""
    doubtful, name = named[0], _within(named[1], key)
    held = [index for index, out in enumerate(outputs) if key in out]
    own = [weights[index] for index in held]
    if len(held) < len(outputs):
        if doubtful is not None:
            doubtful.append(name)
        if abs(sum(weights) - 1) < 1e-6 and sum(own):  # of a mean
            own = [weight / sum(own) for weight in own]
        rows = None if rows is None else _rows_of(held, sizes, rows)
    entries = [outputs[index][key] for index in held]
    return joined(entries, own, [sizes[index] for index in held], rows, doubtful=doubtful, name=name)


def _rows_of(held: Sequence[int], sizes: Sequence[int], rows: Sequence[int]) -> list[int]:
    """The batch's rows that some of its micro-batches hold."""
    return [row for index in held for row in rows[sum(sizes[:index]) : sum(sizes[: index + 1])]]


def _within(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal; for objects that can't be compared, whether they are identical."""
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

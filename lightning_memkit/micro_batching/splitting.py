"""Split a batch into micro-batches whose weighted losses have the full batch's gradient.

A loss that is a mean over samples or labels equals the mean of the micro-batches' losses, each weighted by
the number of samples or labels that it holds. `micro_batches` splits any batch and gives every micro-batch
its weight.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

IGNORED_LABEL = -100
LABEL_NAMES = ("labels", "label", "targets", "target", "y")

WeighBy = Literal["auto", "samples", "labels", "causal_labels", "sum"]
Weigher = Callable[[Any], float]


@runtime_checkable
class SplittableBatch(Protocol):
    """A batch that splits itself, such as `PackedBatch`; used instead of the generic splitter."""

    @property
    def rows(self) -> int:
        """The number of rows that can be split."""
        ...

    def split(self, sizes: Sequence[int]) -> Sequence[Any]:
        """Micro-batches of `sizes` rows each."""
        ...

    def weight(self) -> float:
        """How many samples, labels or whatever the loss is a mean over this batch holds."""
        ...


class SplitError(ValueError):
    """The batch can't be split by the generic splitter; the message says how to provide another."""


def micro_batches(
    batch: Any,
    micro_batch_size: int,
    *,
    weigh_by: WeighBy | Weigher = "auto",
    split: Callable[[Any, Sequence[int]], Sequence[Any]] | None = None,
) -> Iterator[tuple[Any, float]]:
    """Yields (micro-batch, weight); the sum of weight x loss has the full batch's gradient. Copies no tensor.

    A micro-batch of weight 0 is left out.

    Args:
        batch: tensors, mappings, tuples, lists or dataclasses of them, or a batch with its own `split`.
        micro_batch_size: the most samples in a micro-batch; micro-batches are as even as possible.
        weigh_by: what the loss is a mean over: `"samples"`, `"labels"` (those that are not -100),
            `"causal_labels"` (the same without each row's first, for losses that shift inside), `"sum"` (the
            loss is a sum: all weights are 1), a callable from micro-batch to count, or `"auto"`: the batch's
            own `weight()` if it has one, else labels if it has some, else samples.
        split: a function from (batch, sizes) to micro-batches, for a batch that is not split row by row.

    Raises:
        SplitError: the tensors disagree on the number of samples, or there is no tensor to split.
        ValueError: micro_batch_size is below 1, or weigh_by unknown.

    Example:
        >>> for part, weight in micro_batches(batch, 4):
        ...     (weight * loss_of(part)).backward()
    """
    if micro_batch_size < 1:
        raise ValueError(
            f"micro_batch_size={micro_batch_size} is below 1; write the most samples of a micro-batch."
        )
    parts = split_batch(batch, even_sizes(batch_size(batch), micro_batch_size), split=split)
    weigh = weigher(weigh_by, batch)
    counts = [float(weigh(part)) for part in parts]
    for part, weight in zip(parts, normalized(counts, summed=weigh_by == "sum"), strict=True):
        if weight > 0:
            yield part, weight


def normalized(counts: Sequence[float], *, total: float | None = None, summed: bool = False) -> list[float]:
    """Weights of micro-batches: each count divided by the total, or all 1 if the loss is a sum.

    If the total is 0 (no label in the whole batch), the first micro-batch weighs 1, so that the loss is nan
    as the unsplit batch's would be.
    """
    if summed:
        return [1.0] * len(counts)
    whole = sum(counts) if total is None else total
    if whole == 0:
        return [1.0, *[0.0] * (len(counts) - 1)]
    return [count / whole for count in counts]


def even_sizes(total: int, largest: int, fewest: int = 1) -> list[int]:
    """The sizes of the fewest micro-batches of at most `largest`, as even as possible: 8 by 3 is [3, 3, 2].

    No micro-batch holds less than `fewest`, even if one then exceeds `largest`: 5 by 2 with at least 2 in
    each is [3, 2].
    """
    count = max(1, min(-(-total // largest), total // fewest))
    short, extra = divmod(total, count)
    return [short + 1] * extra + [short] * (count - extra)


def batch_size(batch: Any) -> int:
    """How many samples a batch holds: its own `rows`, or the leading size that its tensors share.

    Raises:
        SplitError: tensors disagree on the leading size, one has no rows that can be split (it is nested or sparse),
            or there is no tensor with a leading size.
    """
    if isinstance(batch, SplittableBatch):
        return batch.rows
    remedy = (
        "Collate it to tensors that have one row a sample, or let it offer `rows`, `split(sizes)` and `weight()`, as "
        "PackedBatch does."
    )
    sizes: dict[int, str] = {}
    for name, tensor in named_tensors(batch, "batch"):
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise SplitError(f"{name} is a {kind} tensor, whose rows can't be split. {remedy}")
        if tensor.ndim > 0:
            sizes.setdefault(tensor.shape[0], f"{name} {tuple(tensor.shape)}")
    if not sizes:
        raise SplitError(f"A batch of type {type(batch).__name__} has no tensor to split. {remedy}")
    if len(sizes) > 1:
        raise SplitError(
            f"The tensors of this batch disagree on the leading size: {'; '.join(sizes.values())}. {remedy}"
        )
    return next(iter(sizes))


def split_batch(
    batch: Any, sizes: Sequence[int], *, split: Callable[[Any, Sequence[int]], Sequence[Any]] | None = None
) -> list[Any]:
    """The micro-batches of a batch, of `sizes` samples each, as views without copies.

    A list of plain values with one entry a sample is sliced; any other value that is not a tensor goes to
    every micro-batch.

    Raises:
        SplitError: see `batch_size`; or the user's `split` returned another number of micro-batches.
    """
    if split is not None or isinstance(batch, SplittableBatch):
        parts = list(split(batch, sizes) if split is not None else batch.split(sizes))
        if len(parts) != len(sizes):
            raise SplitError(
                f"split gave {len(parts)} micro-batches for sizes={list(sizes)}; it must give one for each."
            )
        return parts
    size = batch_size(batch)
    if sum(sizes) != size:
        raise SplitError(f"sizes={list(sizes)} add up to {sum(sizes)}, not to the batch's {size} samples.")
    return [_part(batch, index, sizes, size) for index in range(len(sizes))]


def weigher(weigh_by: WeighBy | Weigher, batch: Any) -> Weigher:
    """The function that counts in a micro-batch what the loss is a mean over; see `micro_batches`.

    Raises:
        ValueError: weigh_by is unknown, or counts labels in a batch that has none.
    """
    if callable(weigh_by):
        return weigh_by
    if weigh_by == "auto":
        if isinstance(batch, SplittableBatch):
            return lambda part: part.weight()
        weigh_by = "labels" if find_labels(batch) is not None else "samples"
    if weigh_by in ("samples", "sum"):
        return batch_size
    if weigh_by not in ("labels", "causal_labels"):
        raise ValueError(
            f'weigh_by={weigh_by!r} is unknown; write "auto", "samples", "labels", "causal_labels", "sum", '
            "or a callable from a micro-batch to the number that its loss is a mean over."
        )
    if find_labels(batch) is None:
        raise ValueError(
            f"weigh_by={weigh_by!r} counts labels, but this batch has no integer tensor named "
            f'{", ".join(LABEL_NAMES)}, nor is it a pair that ends in one; write "samples" or a callable.'
        )
    skip = 1 if weigh_by == "causal_labels" else 0

    def count(part: Any) -> float:
        labels = find_labels(part)
        if labels is None:
            raise ValueError(f"weigh_by={weigh_by!r}: a micro-batch has no labels; pass a callable.")
        return int((labels[..., skip:] != IGNORED_LABEL).sum())

    return count


def find_labels(batch: Any) -> Tensor | None:
    """The integer labels of a batch: by name in a mapping or dataclass, else the last of a tuple or list."""
    found: Any = None
    if isinstance(batch, Mapping):
        found = next((batch[name] for name in LABEL_NAMES if name in batch), None)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        found = next((getattr(batch, name) for name in LABEL_NAMES if hasattr(batch, name)), None)
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        found = batch[-1]
    if isinstance(found, Tensor) and found.ndim > 0 and found.dtype in (torch.int64, torch.int32):
        return found
    return None


def _part(item: Any, index: int, sizes: Sequence[int], size: int) -> Any:
    """The index-th micro-batch of any nested structure; structure and types are kept."""
    if isinstance(item, Tensor):
        if item.ndim == 0:
            return item
        return item.narrow(0, sum(sizes[:index]), sizes[index])
    if isinstance(item, Mapping):
        part: Any = copy.copy(item)
        for key, value in item.items():
            part[key] = _part(value, index, sizes, size)
        return part
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_part(value, index, sizes, size) for value in item))
    if isinstance(item, (tuple, list)):
        if item and len(item) == size and not any(_holds_tensor(value) for value in item):
            start = sum(sizes[:index])
            return item[start : start + sizes[index]]  # one plain value (a text, a name) a sample
        return type(item)(_part(value, index, sizes, size) for value in item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        part = copy.copy(item)
        for field in dataclasses.fields(item):
            object.__setattr__(part, field.name, _part(getattr(item, field.name), index, sizes, size))
        return part
    return item


def picked_rows(batch: Any, rows: Sequence[int]) -> Any:
    """Copies of some rows of any nested batch, in the given order.

    A value that is neither a tensor nor a list with one entry a sample is kept as it is.
    """
    size = batch_size(batch)
    index = torch.tensor(list(rows))

    def pick(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item if item.ndim == 0 else item.index_select(0, index.to(item.device))
        if isinstance(item, (list, tuple)) and len(item) == size and not any(map(_holds_tensor, item)):
            return type(item)(item[row] for row in rows) if not hasattr(item, "_fields") else item
        return rebuilt(item, pick)

    return pick(batch)


def rebuilt(item: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a mapping, sequence or dataclass in which `change` has replaced every value."""
    if isinstance(item, Mapping):
        made: Any = copy.copy(item)
        for key, value in item.items():
            made[key] = change(value)
        return made
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*map(change, item))
    if isinstance(item, (tuple, list)):
        return type(item)(change(value) for value in item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        made = copy.copy(item)
        for field in dataclasses.fields(item):
            object.__setattr__(made, field.name, change(getattr(item, field.name)))
        return made
    return item


def _holds_tensor(item: Any) -> bool:
    return next(named_tensors(item, ""), None) is not None


def named_tensors(item: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of any nested structure, in order, each with its path, which begins with `name`."""
    if isinstance(item, Tensor):
        yield name, item
    elif isinstance(item, Mapping):
        for key, value in item.items():
            yield from named_tensors(value, f"{name}[{key!r}]")
    elif isinstance(item, (tuple, list)):
        for index, value in enumerate(item):
            yield from named_tensors(value, f"{name}[{index}]")
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        for field in dataclasses.fields(item):
            yield from named_tensors(getattr(item, field.name), f"{name}.{field.name}")

"""The numbers of a batch that are known before it runs: rows, labels, masks."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.micro_batching.splitting import (
    IGNORED_LABEL,
    SplittableBatch,
    batch_size,
    named_tensors,
)

_LARGEST = 2**20  # elements of a tensor that is counted in every batch
_MOST_COLUMNS = 64  # of labels: one for each task
_SEARCHED = 2**16  # elements of a tensor whose values are told apart
_MOST_VALUES = 16  # of a tensor of classes, each of which a step may count


@dataclass(frozen=True)
class BatchCount:
    """One number of a batch: a count in one of its tensors, in one of its columns, or of the batch.

    Args:
        kind: `"rows"`; `"own"` (the batch's own `weight()`); the `"sum"` of a tensor; or which elements of it count:
            `"labels"` (not -100), `"nonzero"`, `"finite"`, `"positive"`, `"nonnegative"`, `"equal"` or `"above"`.
        path: the tensor's path in the batch. Not its place: other batches may have more tensors, or less.
        start: the first column that counts; losses that shift inside skip a row's first label.
        column: the only column that counts, in the tensor's last dimension.
        value: of `"equal"` and `"above"`.
    """

    kind: str
    path: str = ""
    start: int = 0
    column: int | None = None
    value: float | None = None

    def __call__(self, batch: Any) -> float:
        """The number of a batch, or of a micro-batch of it; nan where the batch has no such number."""
        if self.kind == "rows":
            return float(batch_size(batch))
        if self.kind == "own":
            return float(batch.weight()) if isinstance(batch, SplittableBatch) else nan
        tensor = next((tensor for path, tensor in named_tensors(batch, "") if path == self.path), None)
        if tensor is None or tensor.ndim < (2 if self.start or self.column is not None else 1):
            return nan
        if self.column is not None:
            if self.column >= tensor.shape[-1]:
                return nan
            tensor = tensor[..., self.column]
        tensor = tensor[..., self.start :] if self.start else tensor
        return float(_OF_ELEMENTS[self.kind](tensor, self.value).sum())


_OF_ELEMENTS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "labels": lambda tensor, _: tensor != IGNORED_LABEL,
    "nonzero": lambda tensor, _: tensor != 0,
    "sum": lambda tensor, _: tensor.double(),
    "finite": lambda tensor, _: tensor.isfinite(),
    "positive": lambda tensor, _: tensor > 0,
    "nonnegative": lambda tensor, _: tensor >= 0,
    "equal": lambda tensor, value: tensor == value,
    "above": lambda tensor, value: tensor > value,
}


def counts_of(batch: Any) -> list[BatchCount]:
    """The numbers of a batch that tell its rows apart, and mostly predict a divisor."""
    found = [BatchCount("own")] if isinstance(batch, SplittableBatch) else []
    for path, tensor in _countable(batch):
        kinds = ["sum"] if tensor.is_floating_point() else ["labels", "nonzero", "sum"]
        starts = (0, 1) if tensor.ndim > 1 else (0,)
        found += [BatchCount(kind, path, start) for kind in kinds for start in starts]
    return [*found, BatchCount("rows")]


def numbers_of(batch: Any, known: Collection[BatchCount] = ()) -> dict[BatchCount, float]:
    """The numbers of a batch that could predict a divisor, the likeliest first.

    Those of `counts_of`; then, of each tensor, other kinds of elements, and each kind in every column, since each task
    may have one. Without counts of all elements, which say no more than the number of rows, unless they are known.
    """
    numbers = {count: count(batch) for count in counts_of(batch)}
    for path, tensor in _countable(batch):
        width = tensor.shape[-1] if tensor.ndim > 1 else 0
        for kind, value in _kinds(tensor):
            counted = _OF_ELEMENTS[kind](tensor, value)
            number, rows = float(counted.sum()), counted.numel() // max(width, 1)
            if kind == "sum" or number != counted.numel():
                numbers.setdefault(BatchCount(kind, path, value=value), number)
            own = counted.reshape(-1, width).sum(0).tolist() if 1 < width <= _MOST_COLUMNS else []
            for column, number in enumerate(own):
                if kind == "sum" or number != rows:
                    numbers[BatchCount(kind, path, column=column, value=value)] = float(number)
    return numbers | {count: count(batch) for count in known if count not in numbers}


def _countable(batch: Any) -> Iterator[tuple[str, Tensor]]:
    for path, tensor in named_tensors(batch, ""):
        if tensor.ndim and tensor.numel() <= _LARGEST and not (tensor.is_complex() or tensor.is_sparse):
            yield path, tensor


def _kinds(tensor: Tensor) -> Iterator[tuple[str, float | None]]:
    """The kinds of elements of a tensor that a step may count, and the values that they are compared with.

    Of floats with many values, which are features, targets or weights, their sum, and those that are not missing: how
    many are positive, say, agrees with other counts by chance.
    """
    is_float = tensor.is_floating_point()
    yield "sum", None
    if is_float:
        yield "finite", None
    values = tensor.unique().tolist() if tensor.numel() <= _SEARCHED else [0] * _MOST_VALUES
    if is_float and len(values) > _MOST_VALUES:
        return
    yield from ((kind, None) for kind in ("nonzero", "positive"))
    if not is_float:
        yield from ((kind, None) for kind in ("labels", "nonnegative"))
    if tensor.dtype is not torch.bool and len(values) < _MOST_VALUES:
        yield from (("equal", value) for value in values)
        yield from (("above", value) for value in values[:-1])

"""The numbers of a batch that are known before it runs: rows, labels, masks."""

from collections.abc import Callable
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


@dataclass(frozen=True)
class BatchCount:
    """One number of a batch: a count in one of its tensors, from column `start` on, or of the batch.

    Args:
        kind: `"rows"`, `"own"` (the batch's own `weight()`), `"labels"` (not -100), `"nonzero"` or `"sum"`.
        path: the tensor's path in the batch. Not its place: other batches may have more tensors, or less.
        start: the first column that counts; losses that shift inside skip a row's first label.
    """

    kind: str
    path: str = ""
    start: int = 0

    def __call__(self, batch: Any) -> float:
        """The number of a batch, or of a micro-batch of it; nan where the batch has no such number."""
        if self.kind == "rows":
            return float(batch_size(batch))
        if self.kind == "own":
            return float(batch.weight()) if isinstance(batch, SplittableBatch) else nan
        tensor = next((tensor for path, tensor in named_tensors(batch, "") if path == self.path), None)
        if tensor is None or tensor.ndim < (2 if self.start else 1):
            return nan
        tensor = tensor[..., self.start :] if self.start else tensor
        return float(_COUNTS[self.kind](tensor))


_COUNTS: dict[str, Callable[[Tensor], Tensor]] = {
    "labels": lambda tensor: (tensor != IGNORED_LABEL).sum(),
    "nonzero": torch.count_nonzero,
    "sum": lambda tensor: tensor.double().sum(),
}


def counts_of(batch: Any) -> list[BatchCount]:
    """All numbers of a batch that could predict a divisor."""
    found = [BatchCount("own")] if isinstance(batch, SplittableBatch) else []
    for path, tensor in named_tensors(batch, ""):
        if tensor.ndim == 0 or tensor.numel() > _LARGEST or tensor.is_complex() or tensor.is_sparse:
            continue
        kinds = ["sum"] if tensor.is_floating_point() else ["labels", "nonzero", "sum"]
        starts = (0, 1) if tensor.ndim > 1 else (0,)
        found += [BatchCount(kind, path, start) for kind in kinds for start in starts]
    return [*found, BatchCount("rows")]

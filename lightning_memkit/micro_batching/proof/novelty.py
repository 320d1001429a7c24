"""Detect what a batch has that no batch before it had: keys, dtypes, label values, rows without a label."""

from typing import Any

import torch
from torch import Tensor

from lightning_memkit.micro_batching.splitting import IGNORED_LABEL, named_tensors

_MOST_VALUES = 64  # distinct values of a tensor of labels; one with more holds token ids
_LARGEST = 2**16  # elements of a tensor that is searched in every batch


class Novelties:
    """Remembers what batches held, and tells whether a batch holds something new."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()
        self._many: set[str] = set()  # tensors with more distinct values than `_MOST_VALUES`

    def are_in(self, batch: Any, *, values: bool) -> bool:
        """Whether a batch holds something new; what it holds is remembered.

        Args:
            batch: any nested structure.
            values: consider label values and rows without labels, too, not only keys and dtypes.
        """
        found: set[Any] = set()
        for name, tensor in named_tensors(batch, ""):
            found.add((name, tensor.dtype, tensor.ndim))
            if values and not tensor.is_floating_point() and 0 < tensor.numel() <= _LARGEST and tensor.ndim:
                found |= self._values(name, tensor)
        new = found - self._seen
        self._seen |= found
        return bool(new)

    def _values(self, name: str, tensor: Tensor) -> set[Any]:
        if name in self._many:
            return set()
        distinct = torch.unique(tensor).tolist() if not tensor.is_complex() else []
        if len(distinct) > _MOST_VALUES:
            self._many.add(name)
            return set()
        rows = tensor.reshape(len(tensor), -1)
        empty = bool(((rows == IGNORED_LABEL) | (rows == 0)).all(1).any())
        return {(name, value) for value in distinct} | ({(name, "an empty row")} if empty else set())

"""Detect what a batch has that no batch before it had: keys, dtypes, values, rows without a label, equal rows.

A loss is proven on the rows of a few batches. Padding, missing labels, a rare class or a repeated user that come
later may make it another loss: a mean over something else, rows that act on each other.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.micro_batching.splitting import IGNORED_LABEL, named_tensors

# Distinct values of a tensor of labels, lengths or weights; one with more holds ids or inputs.
_MOST_VALUES = 64
_SEVERAL = 8  # values after which one more is a further class, and no first positive
_LARGEST = 2**16  # elements of a tensor that is searched in every batch

_FIRST_REVISION = 8


def is_revised_after(batches: int) -> bool:
    """Whether a proven loss is compared again after so many batches: 8, and then twice as many each time.

    What changes with the number of steps alone, and shows neither in a batch nor in a graph, is found late.
    """
    return batches >= _FIRST_REVISION and batches.bit_count() == 1


class Novelties:
    """Remembers what batches held, and tells whether a batch holds something new.

    Attributes:
        only_classes: all that was new in the last batch are further values of tensors of which several are known.
    """

    def __init__(self) -> None:
        self.only_classes = False
        self._seen: set[Any] = set()
        self._many: set[str] = set()  # tensors with more distinct values than `_MOST_VALUES`

    def are_in(self, batch: Any) -> bool:
        """Whether a batch holds something new; what it holds is remembered.

        Only tensors of at most 65,536 elements are searched, so that images cost nothing. On an accelerator a
        search would wait for it: there only keys and dtypes count.
        """
        found: set[Any] = set()
        for name, tensor in named_tensors(batch, ""):
            found.add((name, tensor.dtype, tensor.ndim))
            is_searched = tensor.device.type == "cpu" and tensor.layout is torch.strided
            if is_searched and tensor.ndim and 0 < tensor.numel() <= _LARGEST and not tensor.is_complex():
                found |= {(name, what) for what in self._held(name, tensor)}
        new = found - self._seen
        self.only_classes = True
        if not new:
            return False
        known = Counter(one[0] for one in self._seen if _is_value(one))
        self.only_classes = all(_is_value(one) and known[one[0]] >= _SEVERAL for one in new)
        self._seen |= new
        return True

    def _held(self, name: str, tensor: Tensor) -> set[Any]:
        """What is told of a tensor: its few values, or else which kinds of values it has."""
        rows = tensor.reshape(len(tensor), -1)
        if tensor.is_floating_point():
            return self._values(name, tensor) | _of_floats(rows)
        return self._values(name, tensor) | _of_integers(rows)

    def _values(self, name: str, tensor: Tensor) -> set[Any]:
        if name in self._many:
            return set()
        known = tensor[tensor == tensor]
        distinct = torch.unique(known).tolist()
        is_continuous = tensor.is_floating_point() and _SEVERAL < len(distinct) > known.numel() / 2
        if len(distinct) > _MOST_VALUES or is_continuous:
            self._many.add(name)
            return {"many values"}
        return {*distinct, *(["one value"] if len(distinct) < 2 else [])}


def _is_value(found: Any) -> bool:
    """Whether it is a value of a tensor, and no kind of values."""
    return len(found) == 2 and not isinstance(found[1], str)


def _of_floats(rows: Tensor) -> set[str]:
    """Missing values, and rows that are all zero or partly zero."""
    found, missing, zero = set[str](), rows != rows, rows == 0
    if missing.any():
        found |= {"missing values"} | ({"a row without values"} if missing.all(1).any() else set())
    if zero.any():
        found |= {"zeros"} | ({"an empty row"} if zero.all(1).any() else set())
    return found


def _of_integers(rows: Tensor) -> set[str]:
    """Ignored labels, and rows that have none or only such, or equal another row."""
    found, ignored = set[str](), rows == IGNORED_LABEL
    if ignored.any():
        found.add("ignored labels")
    if (ignored | (rows == 0)).all(1).any():
        found.add("an empty row")
    if rows.shape[1] == 1 and len(torch.unique(rows)) < len(rows):
        found.add("equal rows")
    return found

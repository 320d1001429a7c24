"""Detect what a batch has that no batch before it had: keys, dtypes, values, rows without a label, equal rows.

A loss is proven on the rows of a few batches. Padding, missing labels, a rare class or a repeated user that come
later may make it another loss: a mean over something else, rows that act on each other. More of what was there may
make it one, too: a divisor that was clamped in all batches before is a count.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
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
        has_counts: the last batch had more or less of something than any batch before: of rows, of a value, of values
            up to one, of labels that are not ignored.
        has_sums: the same, or the sum of a tensor of many floats was more or less.
        is_larger: a tensor of the last batch had more elements than in any batch before.
    """

    def __init__(self) -> None:
        self.only_classes = self.has_counts = self.has_sums = self.is_larger = False
        self._seen: set[Any] = set()
        self._many: set[str] = set()  # tensors with more distinct values than `_MOST_VALUES`
        self._values_of: dict[str, set[float]] = {}
        self._ranges: dict[Any, tuple[float, float]] = {}
        self._batches = 0

    def are_in(self, batch: Any) -> bool:
        """Whether a batch holds something new; what it holds is remembered.

        Only tensors of at most 65,536 elements are searched, so that images cost nothing. On an accelerator a
        search would wait for it: there only keys and dtypes count.
        """
        found, numbers = set[Any](), dict[Any, float]()
        for name, tensor in named_tensors(batch, ""):
            found.add((name, tensor.dtype, tensor.ndim))
            is_searched = tensor.device.type == "cpu" and tensor.layout is torch.strided
            if is_searched and tensor.ndim and 0 < tensor.numel() <= _LARGEST and not tensor.is_complex():
                counts = self._counts(name, tensor)
                found |= {(name, what) for what in self._held(name, tensor, counts)}
                numbers.update(self._numbers(name, tensor, counts))
        self._batches += 1
        known = self._ranges
        self.is_larger = any(
            what[1] == "elements" and number > known[what][1]
            for what, number in numbers.items()
            if what in known
        )
        wider = [what for what, number in numbers.items() if self._widens(what, number)]
        self.has_sums, self.has_counts = bool(wider), any(what[1] != "sum" for what in wider)
        new = found - self._seen
        self.only_classes = True
        if not new:
            return False
        values = Counter(one[0] for one in self._seen if _is_value(one))
        self.only_classes = all(_is_value(one) and values[one[0]] >= _SEVERAL for one in new)
        self._seen |= new
        return True

    def _held(self, name: str, tensor: Tensor, counts: dict[float, int]) -> set[Any]:
        """What is told of a tensor: its few values, or else which kinds of values it has."""
        rows = tensor.reshape(len(tensor), -1)
        values = {*counts, *(["one value"] if len(counts) < 2 else [])}
        kinds = _of_floats(rows) if tensor.is_floating_point() else _of_integers(rows)
        return kinds | (({"many values"} if counts else set()) if name in self._many else values)

    def _counts(self, name: str, tensor: Tensor) -> dict[float, int]:
        """How often a tensor holds each of its values, if these are few; else that of one."""
        if name in self._many:
            return {}
        known = tensor[tensor == tensor]
        values, counts = torch.unique(known, return_counts=True)
        is_continuous = tensor.is_floating_point() and _SEVERAL < len(values) > known.numel() / 2
        if len(values) > _MOST_VALUES or is_continuous:
            self._many.add(name)
        return dict(zip(values.tolist(), counts.tolist(), strict=True))

    def _numbers(self, name: str, tensor: Tensor, counts: dict[float, int]) -> Iterator[tuple[Any, float]]:
        """What a divisor may count in a tensor."""
        yield (name, "elements"), tensor.numel()
        known = self._values_of.setdefault(name, set())
        if len(known) <= _MOST_VALUES:  # of all batches together: each may have a few of many ids
            known |= {*counts}
        if name in self._many or len(known) > _MOST_VALUES:
            is_float = tensor.is_floating_point()
            own = tensor.nansum() if is_float else (tensor != IGNORED_LABEL).sum()
            yield (name, "sum" if is_float else "labels"), float(own)
            return
        values = sorted(known)
        own = [counts.get(value, 0) for value in values]
        yield from (((name, value), count) for value, count in zip(values, own, strict=True))
        yield from (((name, "up to", value), n) for value, n in zip(values, accumulate(own), strict=True))

    def _widens(self, what: Any, number: float) -> bool:
        """Whether a number is outside of those of all batches before."""
        # Before a value was seen, batches had none of it.
        least, most = self._ranges.get(what, (number, number) if self._batches < 2 else (0.0, 0.0))
        self._ranges[what] = min(least, number), max(most, number)
        return self._ranges[what] != (least, most)


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

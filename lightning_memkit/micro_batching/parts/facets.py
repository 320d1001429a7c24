"""What is peculiar about a micro-batch: a rule that held without it may fail with it.

A logged accuracy over labelled rows is a mean over rows as long as all rows are labelled. So each comparison notes
which masks and labels had none, some or all of their entries; where a micro-batch is the first with one of these, the
rules of logged and returned values are compared again.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, count_nonzero

from lightning_memkit.micro_batching.splitting import IGNORED_LABEL, named_tensors

_LARGEST = 2**16  # elements of a tensor that is looked at in every micro-batch

Facets = frozenset[Any]


def facets_of(part: Any, weight: float = 1.0) -> Facets:
    """For each small tensor of a micro-batch: whether none, some or all of its entries are zero, or are labels.

    Args:
        part: the micro-batch. Tensors on an accelerator are passed over, because reading them waits for it.
        weight: what it counts in the loss; one that counts nothing is peculiar, too.
    """
    found: set[Any] = set() if weight else {"nothing counts"}
    for path, tensor in named_tensors(part, ""):
        if tensor.device.type != "cpu" or not tensor.ndim or not 0 < tensor.numel() <= _LARGEST:
            continue
        found.add((path, "nonzero", _fraction(int(count_nonzero(tensor)), tensor)))
        if not (tensor.is_floating_point() or tensor.is_complex()):
            found.add((path, "labels", _fraction(int(count_nonzero(tensor != IGNORED_LABEL)), tensor)))
    return frozenset(found)


def _fraction(count: int, tensor: Tensor) -> str:
    return "none" if not count else "all" if count == tensor.numel() else "some"


def telling_first(facets: Sequence[Facets], seen: Iterable[Any]) -> list[int]:
    """The micro-batches that hold all facets that were not seen, as few as a greedy choice finds."""
    missing = frozenset[Any]().union(*facets) - frozenset(seen)
    chosen: list[int] = []
    while missing:
        best = max(range(len(facets)), key=lambda index: len(facets[index] & missing))
        chosen.append(best)
        missing -= facets[best]
    return chosen

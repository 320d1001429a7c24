"""Find the tensors in nested values."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_of(item: Any) -> Iterator[Tensor]:
    """Every tensor in nested dicts, lists, tuples and dataclasses."""
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, Mapping):
        for value in item.values():
            yield from tensors_of(value)
    elif isinstance(item, (list, tuple)):
        for value in item:
            yield from tensors_of(value)
    elif hasattr(item, "__dataclass_fields__"):
        yield from tensors_of(list(vars(item).values()))

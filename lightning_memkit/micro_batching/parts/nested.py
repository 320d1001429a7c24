"""Take nested results apart, and rebuild them."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from torch import nn

from lightning_memkit.micro_batching.parts.joining_rules import (
    JoinError,
    Path,
    name_of,
)

DEEPEST_RESULT = 12  # levels of nested results; a limit, because objects may refer to each other in a cycle


def branches(item: Any, depth: int) -> list[tuple[Any, Any]] | None:
    """The keys and values of a structure; None for a leaf, and below `DEEPEST_RESULT` levels."""
    if depth > DEEPEST_RESULT:
        return None
    if isinstance(item, Mapping):
        return list(item.items())
    if isinstance(item, (list, tuple)):
        return list(enumerate(item))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [(field.name, getattr(item, field.name)) for field in dataclasses.fields(item)]
    # An object without an `__eq__` of its own (a model's KV cache) is compared and joined by its attributes.
    if (
        type(item).__eq__ is object.__eq__
        and not isinstance(item, (nn.Module, Enum, type))
        and not callable(item)
    ):
        return list(getattr(item, "__dict__", {}).items()) or None
    return None


def branch(item: Any, key: Any, path: Path) -> Any:
    """An item's entry or attribute by its key.

    Raises:
        JoinError: the item has none.
    """
    try:
        return item[key] if isinstance(item, (Mapping, list, tuple)) else getattr(item, key)
    except (LookupError, AttributeError):
        raise JoinError(f"{name_of((*path, key))} is missing in some micro-batches") from None


def check_same_keys(path: Path, first: Any, parts: Sequence[Any]) -> None:
    """Check that the results of micro-batches have the same keys, in the same order, as `first`.

    Raises:
        JoinError: one has others.
    """
    wanted = [key for key, _ in branches(first, len(path)) or ()]
    for part in parts:
        if [key for key, _ in branches(part, len(path)) or ()] != wanted:
            raise JoinError(f"{name_of(path)} holds other entries in micro-batches than in the whole")


def rebuilt_result(first: Any, joined: dict[Any, Any]) -> Any:
    """A result of the type of `first`, with the joined values."""
    if isinstance(first, Mapping):
        rebuilt: Any = copy.copy(first)
        for key, value in joined.items():
            rebuilt[key] = value
        return rebuilt
    if isinstance(first, (list, tuple)):
        values = list(joined.values())
        return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)
    rebuilt = copy.copy(first)
    for key, value in joined.items():
        object.__setattr__(rebuilt, key, value)
    return rebuilt

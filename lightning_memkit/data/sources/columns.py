"""Token ids in columns of Arrow tables: each row is one row of integers, or is refused with its place."""

from collections.abc import Callable
from typing import Any

import numpy as np

from lightning_memkit.data.sources.token_records import Column

_LISTS = ("is_list", "is_large_list", "is_fixed_size_list", "is_list_view", "is_large_list_view")
_ITEMS = ("is_integer", "is_boolean", "is_null")  # a column of empty lists has no type of items


def flat_column(name: str, column: Any, where: Callable[[int], str]) -> Column:
    """The values of a column of lists, and how many each row has.

    Args:
        name: the column's name.
        column: an Arrow column.
        where: names a row by its number in the column, for errors.

    Raises:
        ValueError: the column's rows are not lists of integers, or one is null or holds a null.
    """
    _refuse_other_type(name, column.type, where)
    lists = column.combine_chunks()
    lists = lists.chunk(0) if hasattr(lists, "chunk") else lists
    counts = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    values = lists.flatten()
    missing = np.flatnonzero(lists.is_null().to_numpy(zero_copy_only=False))
    if not len(missing) and values.null_count:
        at = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))
        missing = np.searchsorted(np.cumsum(counts), at, "right")
    if len(missing):
        raise ValueError(
            f"{where(int(missing[0]))} has null in {name!r} ({len(missing):,} such here); it is one "
            "row of integers, and an empty one is no document. Fill it in, or leave the record out; of records "
            "that have texts instead, tokenise all or none."
        )
    return values.to_numpy(zero_copy_only=False), counts


def _refuse_other_type(name: str, kind: Any, where: Callable[[int], str]) -> None:
    from pyarrow import types

    def is_any(kind: Any, names: tuple[str, ...]) -> bool:
        # Earlier versions of pyarrow lack some.
        return any(test(kind) for name in names if (test := getattr(types, name, None)) is not None)

    if is_any(kind, _LISTS) and is_any(kind.value_type, _ITEMS):
        return
    remedy = "write it so"
    if name != "input_ids":
        remedy += (
            ", or leave the column out or rename it if it does not belong to the tokens (a class, a score)"
        )
    raise ValueError(
        f"{where(0)}: the column {name!r} is of type {kind}, and is read with the token ids as a list of integers a "
        f"document (list<int32>, say); {remedy}."
    )

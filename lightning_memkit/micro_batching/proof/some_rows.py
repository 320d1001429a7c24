"""Rows of a batch for trials."""

from typing import Any

from lightning_memkit.micro_batching import SplitError, batch_size, split_batch


def other_rows(whole: Any, batch: Any) -> Any:
    """The last rows of the whole batch, as many as a trial's `batch` has; other ones as far as possible."""
    total, rows = count_of_rows(whole), count_of_rows(batch)
    return split_batch(whole, [total - rows, rows])[1] if 0 < rows < total else batch


def one_row(batch: Any) -> Any:
    """The first row of a batch; all of one that can't be split."""
    rows = count_of_rows(batch)
    return split_batch(batch, [1, rows - 1])[0] if rows > 1 else batch


def count_of_rows(batch: Any) -> int:
    """How many rows a batch has; 0 if that is unknown."""
    try:
        return batch_size(batch)
    except SplitError:
        return 0

"""The micro-batch sizes of a run, step by step: enough for a run without OOMs to take the same steps."""

from collections.abc import Sequence
from typing import Any

WHOLE = 2**62  # samples in a micro-batch: any batch


class PartsChange(tuple[int, int]):
    """The micro-batch size that holds from one step on; compares and unpacks as (`global_step`, size).

    Args:
        global_step: the optimizer step.
        micro_batch_size: the most samples in a micro-batch; 2**62, shown as `whole`, where no batch is split.
        row_tokens: if micro-batches are formed by tokens, the length of the worst batch's rows: a micro-batch
            holds up to `micro_batch_size * row_tokens` tokens. None if they are formed by rows.
        batch_idx: the index of the batch in the epoch. The batches of an accumulation window share one
            `global_step`.
        chunk_rows: the most rows in a chunk, where batches run whole and modules in chunks; else None.
        chunk_tokens: the most tokens in a chunk, where one row does not fit otherwise; else None.
    """

    global_step: int
    micro_batch_size: int
    row_tokens: int | None
    batch_idx: int
    chunk_rows: int | None
    chunk_tokens: int | None

    def __new__(
        cls,
        global_step: int,
        micro_batch_size: int,
        row_tokens: int | None = None,
        batch_idx: int = 0,
        chunk_rows: int | None = None,
        chunk_tokens: int | None = None,
    ) -> "PartsChange":
        """A pair that carries the rest as attributes."""
        change = super().__new__(cls, (global_step, micro_batch_size))
        change.global_step, change.micro_batch_size = global_step, micro_batch_size
        change.row_tokens, change.batch_idx = row_tokens, batch_idx
        change.chunk_rows, change.chunk_tokens = chunk_rows, chunk_tokens
        return change

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (*self, self.row_tokens, self.batch_idx, self.chunk_rows, self.chunk_tokens)

    def __repr__(self) -> str:
        names = ("row_tokens", "chunk_rows", "chunk_tokens")
        more = [f", {name}={getattr(self, name)}" for name in names if getattr(self, name) is not None]
        size = "whole" if self.micro_batch_size == WHOLE else self.micro_batch_size
        return f"({self.global_step}, {size}{''.join(more)})"


def noted(history: list[PartsChange], change: PartsChange) -> None:
    """Append a change, unless all sizes are the same as in the last entry."""
    last = history[-1] if history else None
    if last is None or _sizes(last) != _sizes(change):
        history.append(change)


def _sizes(change: PartsChange) -> tuple[int | None, ...]:
    return change.micro_batch_size, change.row_tokens, change.chunk_rows, change.chunk_tokens


def in_force(history: Sequence[PartsChange], global_step: int, batch_idx: int = 0) -> PartsChange:
    """The entry of the history that held when a batch was split.

    Raises:
        ValueError: the history begins after that batch.
    """
    before = [change for change in history if (change[0], change.batch_idx) <= (global_step, batch_idx)]
    if not before:
        begins = history[0][0] if history else "nowhere"
        raise ValueError(f"global_step={global_step} lies before the history, which begins at {begins}.")
    return before[-1]

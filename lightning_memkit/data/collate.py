"""Rows of a packing as tensors: one gather from the flat store, padded to the longest row of the batch."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_memkit.data.batch import IGNORED_LABEL, PackedBatch
from lightning_memkit.data.packing import Packing, pack
from lightning_memkit.data.store import TokenStore, offsets_of


def collate(
    store: TokenStore,
    packing: Packing,
    rows: Sequence[int] | NDArray[np.integer],
    *,
    pad_id: int = 0,
    multiple_of: int = 1,
    length: int | None = None,
) -> PackedBatch:
    """The rows as a ``PackedBatch``, padded to the longest of them; takes microseconds a row.

    Labels are the tokens themselves (the model shifts them), -100 at the first token of every document, on
    tokens that the store says are not learned, and on padding.

    Args:
        store: The documents' tokens.
        packing: What stands in each row.
        rows: Which rows, by number.
        pad_id: The token that fills a row's end.
        multiple_of: Rounds the length up, but never beyond the context (64 suits tensor cores).
        length: Tokens in a row; None: what the longest needs. For the parts of a batch.
    """
    chosen = np.asarray(rows, dtype=np.int64)
    if chosen.size == 0:
        raise ValueError("rows is empty; a batch has at least one row.")
    counts = packing.offsets[chosen + 1] - packing.offsets[chosen]
    pieces = _ranges(packing.offsets[chosen], counts)
    sizes = packing.lengths[pieces].astype(np.int64)
    row_of_piece = np.repeat(np.arange(len(chosen)), counts)
    fill = np.bincount(row_of_piece, weights=sizes, minlength=len(chosen)).astype(np.int64)
    length = length or rounded_length(int(fill.max()), packing.context, multiple_of)

    # Pieces stand one behind the other: where the batch's real tokens go, and where they come from.
    row_starts = np.arange(len(chosen)) * length
    targets = offsets_of(sizes)[:-1] - np.repeat(offsets_of(fill)[:-1] - row_starts, counts)
    positions = _ranges(np.zeros_like(sizes), sizes)
    places = np.repeat(targets, sizes) + positions
    sources = np.repeat(store.offsets[packing.documents[pieces]] + packing.starts[pieces], sizes) + positions

    tokens, learned = store.gather(sources)
    input_ids = np.full(len(chosen) * length, pad_id, np.int64)
    input_ids[places] = tokens
    labels = np.full(len(chosen) * length, IGNORED_LABEL, np.int64)
    labels[places] = tokens
    if learned is not None:
        labels[places[~learned]] = IGNORED_LABEL
    labels[targets] = IGNORED_LABEL
    position_ids = (np.arange(length) - fill[:, None] + 1).ravel()  # right in the padding, which begins at 1
    position_ids[places] = positions
    padding_starts = (row_starts + fill)[fill < length]
    cu_seqlens = np.sort(np.concatenate((targets, padding_starts, [len(chosen) * length])))
    return PackedBatch(
        input_ids=_tensor(input_ids, length),
        labels=_tensor(labels, length),
        position_ids=_tensor(position_ids, length),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        max_seqlen=int(np.diff(cu_seqlens).max()),
    )


def full_batch(rows: int, length: int, *, vocabulary: int, seed: int = 0) -> PackedBatch:
    """A batch of random tokens, every row one document of the whole length: what costs the most memory."""
    tokens = np.random.default_rng(seed).integers(0, vocabulary, rows * length)
    store = TokenStore(tokens=tokens, offsets=np.arange(rows + 1) * length)
    return collate(store, pack(store.lengths, length, packing="none"), range(rows))


def rounded_length(longest: int, context: int, multiple_of: int) -> int:
    """The length of a batch whose longest row is ``longest``."""
    if multiple_of < 1:
        raise ValueError(f"multiple_of={multiple_of} is below 1; 1 rounds nothing.")
    return max(longest, min(-(-longest // multiple_of) * multiple_of, context))


def _ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """``starts[i]``, ``starts[i] + 1``, ... ``counts[i]`` times, for every i."""
    offsets = offsets_of(counts)
    return np.repeat(starts - offsets[:-1], counts) + np.arange(offsets[-1])


def _tensor(values: NDArray[np.int64], length: int) -> torch.Tensor:
    return torch.from_numpy(values.reshape(-1, length))

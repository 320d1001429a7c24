"""Rows of a packing as tensors: one copy for each document from the flat store, padded to the batch's longest row."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_memkit.data.batching.batch import IGNORED_LABEL, PackedBatch, unstacked
from lightning_memkit.data.packing.pack import Packing, pack
from lightning_memkit.data.sources.store import TokenStore, is_long, offsets_of, ranges


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

    Labels are the tokens themselves (the model shifts them), with -100 at the first token of every document,
    on tokens that the store marks as not learned, and on padding.

    Args:
        store: The documents' tokens.
        packing: The contents of each row.
        rows: Which rows, by number.
        pad_id: The token that fills the end of a row.
        multiple_of: Rounds the length up, but never beyond the context (64 suits tensor cores).
        length: Tokens in a row; None: as the longest row needs. Set for parts of a batch.
    """
    chosen = np.asarray(rows, dtype=np.int64)
    if chosen.size == 0:
        raise ValueError("rows is empty; a batch has at least one row.")
    firsts, lasts = packing.offsets[chosen], packing.offsets[chosen + 1]
    pieces = ranges(firsts, lasts - firsts)
    sizes = packing.lengths[pieces].astype(np.int64)
    bounds = offsets_of(lasts - firsts)
    read = offsets_of(sizes)[bounds]
    fills = read[1:] - read[:-1]
    length = length or rounded_length(int(fills.max()), packing.context, multiple_of)

    # Documents are read end to end into flat arrays and then copied into rows, each followed by its padding.
    tokens, learned = store.read(store.offsets[packing.documents[pieces]] + packing.starts[pieces], sizes)
    positions = _positions(sizes, packing.context)
    # One tensor for all three: workers should send as few as possible.
    whole = torch.empty(3, len(chosen), length, dtype=torch.int64)
    input_ids, labels, position_ids = whole.numpy()
    begin = 0
    for row, fill in enumerate(fills.tolist()):
        end = begin + fill
        input_ids[row, :fill] = tokens[begin:end]
        labels[row, :fill] = input_ids[row, :fill]
        position_ids[row, :fill] = positions[begin:end]
        if learned is not None:
            labels[row, :fill][~learned[begin:end]] = IGNORED_LABEL
        if fill < length:
            input_ids[row, fill:] = pad_id
            labels[row, fill:] = IGNORED_LABEL
            position_ids[row, fill:] = np.arange(1, length - fill + 1)
        begin = end
    # A segment is a chunk of a document, or the padding after a row's last one.
    is_short, segments = fills < length, sizes
    if is_short.any():
        segments = np.insert(sizes, bounds[1:][is_short], (length - fills)[is_short])
    cu_seqlens = np.zeros(len(segments) + 1, np.int32)
    np.cumsum(segments, out=cu_seqlens[1:])
    labels.reshape(-1)[cu_seqlens[:-1]] = IGNORED_LABEL
    return PackedBatch(
        **dict(zip(("input_ids", "labels", "position_ids"), unstacked(whole), strict=True)),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=int(segments.max()),
    )


def full_batch(rows: int, length: int, *, vocabulary: int, seed: int = 0) -> PackedBatch:
    """A batch of random tokens in which every row is one full-length document: it needs the most memory."""
    tokens = np.random.default_rng(seed).integers(0, vocabulary, rows * length)
    store = TokenStore(tokens=tokens, offsets=np.arange(rows + 1) * length)
    return collate(store, pack(store.lengths, length, packing="none"), range(rows))


def rounded_length(longest: int, context: int, multiple_of: int) -> int:
    """The length of a batch whose longest row is ``longest``."""
    if multiple_of < 1:
        raise ValueError(f"multiple_of={multiple_of} is below 1; 1 rounds nothing.")
    return max(longest, min(-(-longest // multiple_of) * multiple_of, context))


@lru_cache(maxsize=4)
def _counting(most: int) -> NDArray[np.int64]:
    return np.arange(most)


def _positions(sizes: NDArray[np.int64], context: int) -> NDArray[np.int64]:
    """0, 1, 2, ... for every size, concatenated."""
    if not is_long(sizes):
        return ranges(np.zeros_like(sizes), sizes)
    counting = _counting(context)
    return np.concatenate([counting[:size] for size in sizes.tolist()])

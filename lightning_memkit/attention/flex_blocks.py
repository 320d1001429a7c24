"""Computes which blocks of tokens see each other in a packed batch, from the documents' bounds alone."""

from dataclasses import dataclass

import numpy as np

from lightning_memkit.attention.documents import Documents

_SMALLEST, _LARGEST = 128, 1024  # tokens in a block
_MOST_BYTES = 5 << 17  # for all tables; larger blocks take fewer bytes, but compute more


@dataclass(frozen=True, kw_only=True)
class BlockTable:
    """For each block of tokens, the positions of other blocks.

    Attributes:
        counts: int32 [blocks], how many others.
        places: int32 [blocks, most]; entries beyond a row's count are undefined.
    """

    counts: np.ndarray
    places: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self.counts.nbytes + self.places.nbytes


@dataclass(frozen=True, kw_only=True)
class BlockTables:
    """The tables of a block mask, without its mask function.

    Attributes:
        size: tokens in a block.
        seen: for each block of queries, the blocks of keys that it sees in part.
        seen_whole: for each block of queries, the blocks of keys that it sees as a whole.
        seeing: for each block of keys, the blocks of queries that see it in part.
        seeing_whole: for each block of keys, the blocks of queries that see it as a whole.

    The tables of a pair (`seen` and `seen_whole`, `seeing` and `seeing_whole`) have rows of one length: torch's CUDA
    kernels find a row of the second table by the first one's stride.
    """

    size: int
    seen: BlockTable
    seen_whole: BlockTable
    seeing: BlockTable
    seeing_whole: BlockTable

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        return sum(table.nbytes for table in (self.seen, self.seen_whole, self.seeing, self.seeing_whole))


def block_tables(documents: Documents, bounds: np.ndarray) -> BlockTables:
    """The block tables of a batch; computed on the host, in time and memory proportional to the blocks that meet.

    Documents are contiguous, so the blocks that a block meets form a range. No pair of tokens is examined:
    torch's `create_block_mask` takes 3 to 11 bytes a pair, 13 to 47 GB at 65,536 tokens.

    Args:
        documents: their causality and window.
        bounds: their `cu_seqlens` on the host, [documents + 1].
    """
    size = _SMALLEST
    while True:
        tables = _of_size(documents, bounds.astype(np.int64), size)
        if tables.nbytes <= _MOST_BYTES or size == _LARGEST:
            return tables
        size *= 2


def _of_size(documents: Documents, bounds: np.ndarray, size: int) -> BlockTables:
    blocks = _MaskBlocks(documents, bounds, size)
    seen, seen_whole = blocks.met(before=True, after=not documents.causal)
    seeing, seeing_whole = blocks.met(before=False, after=True) if documents.causal else (seen, seen_whole)
    return BlockTables(size=size, seen=seen, seen_whole=seen_whole, seeing=seeing, seeing_whole=seeing_whole)


class _MaskBlocks:
    """Where blocks begin and end, and in which documents."""

    def __init__(self, documents: Documents, bounds: np.ndarray, size: int) -> None:
        self._size, self._window, self._causal = size, documents.window, documents.causal
        self._begins = np.arange(0, bounds[-1], size)
        self._ends = np.minimum(self._begins + size, bounds[-1])  # the first token behind a block
        self._first = np.searchsorted(bounds[1:], self._begins, side="right")  # index of the document
        self._last = np.searchsorted(bounds[1:], self._ends - 1, side="right")
        # Range of tokens that may be met.
        self._lowest, self._highest = bounds[self._first], bounds[self._last + 1]

    def met(self, *, before: bool, after: bool) -> tuple[BlockTable, ...]:
        """The blocks met in part and as a whole: a block itself and, as chosen, those before and after it."""
        lowest = self._lowest if before else self._begins
        highest = self._highest if after else self._ends
        if self._window is not None:
            lowest = np.maximum(lowest, self._begins - self._window + 1)
            highest = np.minimum(highest, self._ends + self._window - 1)
        low, high = lowest // self._size, (highest - 1) // self._size
        counts = high - low + 1
        rows = np.repeat(np.arange(len(counts)), counts)
        places = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts) + low[rows]
        whole = self._is_whole(rows, places)
        return self._tables((rows[~whole], places[~whole]), (rows[whole], places[whole]))

    def _is_whole(self, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Whether all tokens of a block see all tokens of another; a last block that is not full is never whole."""
        inside = (self._first == self._last) & (self._ends - self._begins == self._size)
        whole = inside[rows] & inside[places] & (self._first[rows] == self._first[places])
        if self._causal:
            whole &= places != rows
        if self._window is not None:
            whole &= (np.abs(places - rows) + 1) * self._size - 1 < self._window
        return whole

    def _tables(self, *pairs: tuple[np.ndarray, np.ndarray]) -> tuple[BlockTable, ...]:
        """Tables of pairs of blocks, which come in the order of their rows; of one width."""
        counts = [np.bincount(rows, minlength=len(self._begins)) for rows, _ in pairs]
        most = max(1, *(int(count.max(initial=0)) for count in counts))
        tables = []
        for (rows, places), count in zip(pairs, counts, strict=True):
            table = np.zeros((len(count), most), np.int32)
            table[rows, np.arange(len(rows)) - np.repeat(count.cumsum() - count, count)] = places
            tables.append(BlockTable(counts=count.astype(np.int32), places=table))
        return tuple(tables)

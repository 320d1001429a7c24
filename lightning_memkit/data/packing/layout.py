"""Which chunks of which documents are in which row: the result of every packer, and the input of every batch."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_memkit.data.packing.pieces import DocumentCounts, Pieces, RowLimits, WorkLimit, take
from lightning_memkit.data.sources.store import offsets_of

# Numbers of the chunks in the order of their rows, their lengths, and the offset of each row, [rows + 1].
ByRow = tuple[NDArray[np.integer], NDArray[np.int32], NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class Packing(DocumentCounts):
    """Which chunks of which documents are in which row: flat integer arrays, at most 16 bytes a chunk.

    Row ``r`` holds the chunks ("pieces") ``offsets[r]`` to ``offsets[r + 1]``; chunk ``p`` is tokens
    ``starts[p]`` to ``starts[p] + lengths[p]`` of document ``documents[p]``.

    Attributes:
        context: Tokens that a row can hold.
        offsets: The first chunk of each row, [rows + 1].
        documents: The document of each chunk, [pieces].
        starts: The first token of each chunk within its document, [pieces].
        lengths: The number of tokens of each chunk, [pieces].
        work_limit: Work that a row can hold; None: only its tokens are limited.
    """

    context: int
    offsets: NDArray[np.int64]
    documents: NDArray[np.integer]
    starts: NDArray[np.integer]
    lengths: NDArray[np.integer]
    work_limit: WorkLimit | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.offsets) - 1

    @property
    def pieces(self) -> int:
        """Number of chunks; if no document was split, the number of documents in the rows."""
        return len(self.documents)

    @cached_property
    def tokens(self) -> int:
        """Tokens in all rows."""
        return int(self.lengths.sum(dtype=np.int64))

    @cached_property
    def row_tokens(self) -> NDArray[np.int64]:
        """Tokens in each row, [rows]."""
        return self._row_sums(self.lengths)

    def row_work(self, linear: int = 0) -> NDArray[np.int64]:
        """Work of each row, [rows]: the sum of length * (length + ``linear``) over its chunks.

        With ``linear=0`` it is that of attention alone; see ``WorkLimit`` for what else it may include.
        """
        lengths = self.lengths.astype(np.int64)
        return self._row_sums(lengths * (lengths + linear))

    @cached_property
    def lower_bound_rows(self) -> int:
        """A lower bound: no packing of these tokens within these limits needs fewer rows."""
        by_tokens = -(-self.tokens // self.context)
        if self.work_limit is None:
            return by_tokens
        work = int(self.row_work(self.work_limit.linear).sum())
        return max(by_tokens, -(-work // self.work_limit.most))

    @property
    def efficiency(self) -> float:
        """Fraction of the rows' space that tokens fill, 0 to 1."""
        return self.tokens / (self.rows * self.context) if self.rows else 1.0

    @property
    def over_bound(self) -> float:
        """How many more rows than the lower bound, as a fraction of it: 0.0002 is 0.02 %."""
        return self.rows / self.lower_bound_rows - 1 if self.rows else 0.0

    def shuffled(self, seed: int) -> "Packing":
        """The same rows in random order; packers put rows of a few long documents first."""
        return self.in_order(np.random.default_rng(seed).permutation(self.rows))

    def in_order(self, order: NDArray[np.integer]) -> "Packing":
        """The rows with these numbers, in this order."""
        counts = np.diff(self.offsets)[order]
        offsets = offsets_of(counts)
        pieces = np.repeat(self.offsets[:-1][order] - offsets[:-1], counts) + np.arange(offsets[-1])
        return replace(
            self,
            offsets=offsets,
            documents=self.documents[pieces],
            starts=take(self.starts, pieces),
            lengths=self.lengths[pieces],
        )

    def numbered_from(self, first: int, kind: type[np.integer]) -> "Packing":
        """The same rows for the documents ``first``, ``first + 1``, ..., as integers of this dtype."""
        return replace(self, documents=self.documents.astype(kind) + kind(first))

    def divisible(self, by: int) -> "Packing":
        """The same chunks in a number of rows that ``by`` divides: at most ``by - 1`` more rows.

        If ``by`` is the number of ranks, every rank gets the same number of rows and none is left over. The
        rows with the most chunks are cut in two.

        Raises:
            ValueError: ``by`` is below 1, or there are too few chunks for that many rows.
        """
        if by < 1:
            raise ValueError(f"by={by} is below 1; it is the number that shall divide the number of rows.")
        missing = -self.rows % by
        if self.rows + missing > self.pieces:
            raise ValueError(
                f"{self.pieces} pieces can't stand in {self.rows + missing} rows (the next multiple of "
                f"by={by}); a row holds at least one piece. Give more documents, or a smaller number."
            )
        if not missing:
            return self
        counts = np.diff(self.offsets)
        most = np.argpartition(-counts, min(missing, self.rows) - 1)[:missing]
        heap = [(-int(counts[row]), int(self.offsets[row])) for row in np.sort(most)]
        heapq.heapify(heap)
        cuts = []
        for _ in range(missing):
            pieces, begin = heap[0]
            first = self._halfway(begin, begin - pieces) - begin
            cuts.append(begin + first)
            heapq.heapreplace(heap, (-first, begin))
            heapq.heappush(heap, (pieces + first, begin + first))
        return replace(self, offsets=np.sort(np.concatenate((self.offsets, cuts))))

    def _halfway(self, begin: int, end: int) -> int:
        """Where to cut these chunks so that both halves have about as many tokens, and at least one chunk."""
        running = np.cumsum(self.lengths[begin : end - 1], dtype=np.int64)
        half = (int(running[-1]) + int(self.lengths[end - 1])) / 2
        return begin + int(np.argmin(np.abs(running - half))) + 1

    def _row_sums(self, of_pieces: NDArray[np.integer]) -> NDArray[np.int64]:
        running = offsets_of(of_pieces)
        return running[self.offsets[1:]] - running[self.offsets[:-1]]


def laid_out(pieces: Pieces, by_row: ByRow, limits: RowLimits) -> Packing:
    """The packing of the chunks in these rows."""
    order, lengths, offsets = by_row
    return Packing(
        context=limits.context,
        offsets=offsets,
        documents=order if pieces.documents is None else pieces.documents[order],
        starts=take(pieces.starts, order),
        lengths=lengths,
        work_limit=limits.work,
        **vars(pieces.counts),
    )


def joined(packings: Sequence[Packing]) -> Packing:
    """The rows of all packings, concatenated; document numbers are not changed.

    Raises:
        ValueError: there is none, or their limits differ.
    """
    if len({(packing.context, packing.work_limit) for packing in packings}) != 1:
        raise ValueError(
            f"{len(packings)} packings of different context or work limit, or none; they share one."
        )
    first_pieces = offsets_of(np.array([packing.pieces for packing in packings]))
    rows = [packing.offsets[:-1] + first for packing, first in zip(packings, first_pieces[:-1], strict=True)]
    starts = [packing.starts for packing in packings]
    from_zero = all(part.strides == (0,) and not part[:1].any() for part in starts)
    return replace(
        packings[0],
        **{name: sum(getattr(packing, name) for packing in packings) for name in DocumentCounts.names()},
        offsets=np.concatenate((*rows, first_pieces[-1:])),
        documents=np.concatenate([packing.documents for packing in packings]),
        starts=np.broadcast_to(np.int32(0), first_pieces[-1:]) if from_zero else np.concatenate(starts),
        lengths=np.concatenate([packing.lengths for packing in packings]),
    )

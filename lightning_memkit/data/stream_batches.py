"""Batches of a stream: its windows dealt row by row to the steps of all ranks, each with the position behind it."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from lightning_memkit.data.batch import PackedBatch
from lightning_memkit.data.collate import collate, rounded_length
from lightning_memkit.data.layout import Packing
from lightning_memkit.data.pieces import LongDocuments, WorkLimit
from lightning_memkit.data.progress import Progress
from lightning_memkit.data.store import TokenStore, joined
from lightning_memkit.data.streaming import StreamPacker, StreamWindow


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Documents as they come.

    Attributes:
        read: Stores of consecutive documents from a number on, for an epoch: ``read(epoch, first_document)``. A
            document that is not wanted has no tokens, so that numbers stay.
        context: Tokens a row can hold.
        long_documents: What becomes of a document longer than that.
        seed: Of the order of rows within windows.
        pad_id: The token that fills a row's end.
        multiple_of: Rounds a batch's length up, but never beyond the context.
        work_limit: Attention work a row can hold; None: only its tokens are limited.
    """

    read: Callable[[int, int], Iterator[TokenStore]]
    context: int
    long_documents: LongDocuments = "error"
    seed: int = 0
    pad_id: int = 0
    multiple_of: int = 1
    work_limit: WorkLimit | None = None


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where an epoch stands behind a batch.

    Attributes:
        batches: Steps that are done.
        first_document: The first document of the window whose rows come next.
        rows: Rows of that window that are done.
        before: What all ranks were dealt so far, in this epoch and those before it.
        truncated_documents: In the windows so far, over all epochs.
        truncated_tokens: In the windows so far, over all epochs.
        is_end: No batch of the epoch is left.
    """

    batches: int = 0
    first_document: int = 0
    rows: int = 0
    before: Progress = Progress()
    truncated_documents: int = 0
    truncated_tokens: int = 0
    is_end: bool = False


@dataclass(frozen=True, kw_only=True)
class _Row:
    store: TokenStore
    packing: Packing
    number: int
    first_document: int
    truncated: tuple[int, int]  # documents and tokens, by the end of this row's window

    @property
    def tokens(self) -> int:
        return int(self.packing.row_tokens[self.number])

    @property
    def documents(self) -> int:
        """Documents that begin in it."""
        first, last = self.packing.offsets[self.number : self.number + 2]
        return int(np.count_nonzero(self.packing.starts[first:last] == 0))


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Whose batches they are, and how large.

    Attributes:
        rank: Of this process.
        ranks: Number of processes that share the rows.
        batch_size: Rows a batch.
        drop_last: Leaves out what is left for a last, smaller step.
    """

    rank: int
    ranks: int
    batch_size: int
    drop_last: bool


class StreamBatches:
    """This rank's batches of an epoch, each with the position behind it."""

    def __init__(self, stream: Stream, turn: Turn, epoch: int, begin: Position) -> None:
        self._stream, self._epoch, self._begin = stream, epoch, begin
        self._rank, self._ranks, self._size = turn.rank, turn.ranks, turn.batch_size
        self._drop_last = turn.drop_last

    def __iter__(self) -> Iterator[tuple[PackedBatch, Position]]:
        position = self._begin
        for step in self._steps():
            cuts = [len(step) * rank // self._ranks for rank in range(self._ranks + 1)]
            shares = [step[begin:end] for begin, end in pairwise(cuts)]
            position = self._behind(position, shares)
            yield self._collated(shares[self._rank]), position

    def _steps(self) -> Iterator[list[_Row]]:
        """The rows of each step over all ranks; what is left at the end is shared by all, at least a row each."""
        full = self._size * self._ranks
        held: deque[_Row] = deque()
        steps = self._begin.batches
        for row in self._rows():
            held.append(row)
            if len(held) >= full + self._ranks:
                steps += 1
                yield [held.popleft() for _ in range(full)]
        if len(held) > full:  # behind a full step fewer rows than ranks would be left
            gives_up = not self._drop_last and self._size > 1
            steps += 1
            yield [held.popleft() for _ in range(len(held) - self._ranks if gives_up else full)]
        if len(held) == full or (len(held) >= self._ranks and not self._drop_last):
            yield list(held)
        elif steps == 0 and len(held) < full:
            raise ValueError(
                f"The stream's {len(held)} rows are too few for batch_size={self._size} on {self._ranks} rank(s) with "
                f"drop_last={self._drop_last}; add documents, or lower the batch size or the context."
            )

    def _rows(self) -> Iterator[_Row]:
        begin = self._begin
        truncated = (begin.truncated_documents, begin.truncated_tokens)
        for store, window in self._windows():
            packing = window.packing
            is_begun = window.first_document == begin.first_document and begin.batches > 0
            if not is_begun or not begin.rows:
                truncated = (
                    truncated[0] + packing.truncated_documents,
                    truncated[1] + packing.truncated_tokens,
                )
            for number in range(begin.rows if is_begun else 0, packing.rows):
                yield _Row(
                    store=store,
                    packing=packing,
                    number=number,
                    first_document=window.first_document,
                    truncated=truncated,
                )

    def _windows(self) -> Iterator[tuple[TokenStore, StreamWindow]]:
        stream, first = self._stream, self._begin.first_document
        packer = StreamPacker(
            stream.context,
            long_documents=stream.long_documents,
            work_limit=stream.work_limit,
            seed=stream.seed + self._epoch,
            first_document=first,
        )
        held: list[TokenStore] = []
        for store in stream.read(self._epoch, first):
            held.append(store)
            windows = packer.extend(store.lengths)
            if windows:
                held = [joined(held)]
            for window in windows:
                yield held[0], window
                held = [_without(held[0], window.documents)]
        held = [joined(held)]
        for window in packer.finish():
            yield held[0], window
            held = [_without(held[0], window.documents)]

    def _behind(self, position: Position, shares: list[list[_Row]]) -> Position:
        last = shares[-1][-1]
        rows = [row for share in shares for row in share]
        return Position(
            batches=position.batches + 1,
            first_document=last.first_document,
            rows=last.number + 1,
            before=position.before.plus(
                Progress(
                    documents=sum(row.documents for row in rows),
                    tokens=sum(row.tokens for row in rows),
                    room=sum(len(share) * self._length(share) for share in shares),
                )
            ),
            truncated_documents=last.truncated[0],
            truncated_tokens=last.truncated[1],
        )

    def _length(self, rows: list[_Row]) -> int:
        return rounded_length(max(row.tokens for row in rows), self._stream.context, self._stream.multiple_of)

    def _collated(self, rows: list[_Row]) -> PackedBatch:
        length, parts = self._length(rows), []
        for _, group in groupby(rows, key=lambda row: row.first_document):
            of_window = list(group)
            parts.append(
                collate(
                    of_window[0].store,
                    of_window[0].packing,
                    [row.number for row in of_window],
                    pad_id=self._stream.pad_id,
                    length=length,
                )
            )
        return parts[0] if len(parts) == 1 else PackedBatch.joined(parts, len(rows))


def _without(store: TokenStore, documents: int) -> TokenStore:
    """The store without its first documents."""
    begin = store.offsets[documents]
    learned = None if store.learned is None else store.learned[begin:]
    return TokenStore(tokens=store.tokens[begin:], offsets=store.offsets[documents:] - begin, learned=learned)

"""Batches of a stream: the rows of its windows go to the steps of all ranks in turn; each batch has its position."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from lightning_memkit.data.batching.batch import PackedBatch
from lightning_memkit.data.batching.collate import collate, rounded_length
from lightning_memkit.data.batching.progress import Progress
from lightning_memkit.data.packing.layout import Packing
from lightning_memkit.data.packing.pieces import LongDocuments, WorkLimit
from lightning_memkit.data.packing.streaming import StreamPacker, StreamWindow
from lightning_memkit.data.sources.checksums import checksum_of, crc_of
from lightning_memkit.data.sources.store import TokenStore, joined


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Documents in the order in which they arrive.

    Attributes:
        read: Yields stores of consecutive documents, for an epoch and from a document number on:
            ``read(epoch, first_document)``. A document that is not wanted has no tokens, so that numbers stay
            the same.
        context: Tokens that a row can hold.
        long_documents: How documents longer than that are treated.
        seed: The seed of the order of rows within windows.
        pad_id: The token that fills the end of a row.
        multiple_of: Rounds a batch's length up, but never beyond the context.
        work_limit: Attention work that a row can hold; None: only its tokens are limited.
        made_from: The sources of the documents, by name: explains to whoever resumes with other documents why
            they differ.
    """

    read: Callable[[int, int], Iterator[TokenStore]]
    context: int
    long_documents: LongDocuments = "error"
    seed: int = 0
    pad_id: int = 0
    multiple_of: int = 1
    work_limit: WorkLimit | None = None
    made_from: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Position:
    """The position of an epoch after a batch.

    Attributes:
        batches: Steps that are done.
        first_document: The first document of the window whose rows come next.
        rows: Rows of that window that are done.
        before: What was delivered to all ranks so far, in this epoch and earlier ones.
        truncated_documents: Truncated documents in the windows so far, over all epochs.
        truncated_tokens: Tokens dropped by truncation in the windows so far, over all epochs.
        is_end: Whether the epoch has no further batch.
        window_crc: Checksum of that window's documents, which a resume reads again; empty: not known.
    """

    batches: int = 0
    first_document: int = 0
    rows: int = 0
    before: Progress = Progress()
    truncated_documents: int = 0
    truncated_tokens: int = 0
    is_end: bool = False
    window_crc: str = ""


@dataclass(frozen=True, kw_only=True)
class _StreamRow:
    store: TokenStore
    packing: Packing
    number: int
    first_document: int
    truncated: tuple[int, int]  # documents and tokens, up to the end of this row's window
    window_crc: str
    whole: int | None = None  # the number of the row that it was cut from

    @property
    def tokens(self) -> int:
        return int(self.packing.row_tokens[self.number])

    @property
    def documents(self) -> int:
        """Number of documents that begin in it."""
        first, last = self.packing.offsets[self.number : self.number + 2]
        return int(np.count_nonzero(self.packing.starts[first:last] == 0))


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The rank and the size of its batches.

    Attributes:
        rank: The rank of this process.
        ranks: Number of processes that divide the rows.
        batch_size: Rows a batch.
        drop_last: Drops the rows that would make a last, smaller step.
    """

    rank: int
    ranks: int
    batch_size: int
    drop_last: bool


class StreamBatches:
    """This rank's batches of an epoch, each with the position after it.

    Args:
        stream: The documents.
        turn: The rank and the size of its batches.
        epoch: The number of the epoch.
        begin: The position to begin at.
        differences: The changes in what the documents are made from since that position, in words; for an
            error.
    """

    def __init__(
        self, stream: Stream, turn: Turn, epoch: int, begin: Position, differences: Sequence[str] = ()
    ) -> None:
        self._differences = differences
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

    def _steps(self) -> Iterator[list[_StreamRow]]:
        """The rows of each step over all ranks; all ranks divide the last remaining rows, at least one each."""
        full = self._size * self._ranks
        held: deque[_StreamRow] = deque()
        steps = self._begin.batches
        for row in self._rows():
            held.append(row)
            if len(held) >= full + self._ranks:
                steps += 1
                yield [held.popleft() for _ in range(full)]
        if len(held) > full:  # otherwise fewer rows than ranks would be left after a full step
            gives_up = not self._drop_last and self._size > 1
            steps += 1
            yield [held.popleft() for _ in range(len(held) - self._ranks if gives_up else full)]
        if 0 < len(held) < self._ranks and not self._drop_last:
            held = deque(_cut(list(held), self._ranks))
        if len(held) == full or (len(held) >= self._ranks and not self._drop_last):
            yield list(held)
        elif held and 0 < steps == self._begin.batches and not self._drop_last:
            raise ValueError(
                f"One step of the epoch is left, of {len(held)} rows, too few for {self._ranks} ranks, and too few "
                f"documents are in them to cut rows; end the epoch on at most {len(held)} rank(s), and resume on "
                "more after it."
            )
        elif steps == 0 and len(held) < full:
            raise ValueError(
                f"The stream's {len(held)} rows are too few for batch_size={self._size} on {self._ranks} rank(s) with "
                f"drop_last={self._drop_last}; add documents, or lower the batch size or the context."
            )

    def _rows(self) -> Iterator[_StreamRow]:
        begin, is_reached = self._begin, self._begin.batches == 0
        truncated = (begin.truncated_documents, begin.truncated_tokens)
        for store, window in self._windows():
            is_reached = True
            packing, crc = window.packing, _crc(store, window.documents)
            is_begun = window.first_document == begin.first_document and begin.batches > 0
            if is_begun and begin.window_crc not in ("", crc):
                self._refuse(window, crc)
            if not is_begun or not begin.rows:
                truncated = (
                    truncated[0] + packing.truncated_documents,
                    truncated[1] + packing.truncated_tokens,
                )
            for number in range(begin.rows if is_begun else 0, packing.rows):
                yield _StreamRow(
                    store=store,
                    packing=packing,
                    number=number,
                    first_document=window.first_document,
                    truncated=truncated,
                    window_crc=crc,
                )
        if not is_reached:
            raise ValueError(
                f"The stream ends before its document {begin.first_document}, at which the position was taken: it "
                "gives fewer documents than then. Resume with the same documents, or load the weights alone."
            )

    def _refuse(self, window: StreamWindow, crc: str) -> None:
        last = window.first_document + window.documents - 1
        because = (
            f" What they are made from differs: {'; '.join(self._differences)}." if self._differences else ""
        )
        raise ValueError(
            f"The stream's documents {window.first_document} to {last} are others than those that the position was "
            f"taken in (checksum: {self._begin.window_crc} then, {crc} now).{because} Resume with the same documents, "
            "or load the weights alone."
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

    def _behind(self, position: Position, shares: list[list[_StreamRow]]) -> Position:
        last = shares[-1][-1]
        rows = [row for share in shares for row in share]
        return Position(
            batches=position.batches + 1,
            first_document=last.first_document,
            rows=(last.number if last.whole is None else last.whole) + 1,
            before=position.before.plus(
                Progress(
                    documents=sum(row.documents for row in rows),
                    tokens=sum(row.tokens for row in rows),
                    room=sum(len(share) * self._length(share) for share in shares),
                )
            ),
            truncated_documents=last.truncated[0],
            truncated_tokens=last.truncated[1],
            window_crc=last.window_crc,
        )

    def _length(self, rows: list[_StreamRow]) -> int:
        return rounded_length(max(row.tokens for row in rows), self._stream.context, self._stream.multiple_of)

    def _collated(self, rows: list[_StreamRow]) -> PackedBatch:
        length, parts = self._length(rows), []
        for _, group in groupby(rows, key=lambda row: id(row.packing)):
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


def _crc(store: TokenStore, documents: int) -> str:
    """Checksum of a store's first documents, independent of the dtype of their tokens."""
    end = store.offsets[documents]
    crcs = [crc_of(store.tokens[:end], np.int32), crc_of(store.offsets[: documents + 1])]
    return checksum_of(crcs if store.learned is None else [*crcs, crc_of(store.learned[:end])])


def _cut(rows: list[_StreamRow], number: int) -> list[_StreamRow]:
    """This many rows of the same documents, cut between documents; unchanged if there are too few chunks."""
    cut = list(rows)
    while len(cut) < number:
        pieces = [int(np.diff(row.packing.offsets)[row.number]) for row in cut]
        most = int(np.argmax(pieces))
        if pieces[most] < 2:
            return rows
        row = cut[most]
        halves = row.packing.in_order(np.array([row.number])).divisible(2)
        whole = row.number if row.whole is None else row.whole
        cut[most : most + 1] = [replace(row, packing=halves, number=half, whole=whole) for half in range(2)]
    return cut

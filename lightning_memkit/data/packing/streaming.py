"""Packs documents as they arrive: in windows of a fixed number of rows, each packed by best-fit decreasing.

A window consists of as many of the next documents as fill ``window_rows`` rows, and depends on nothing before
it. So only the number of its first document must be saved: reading on from there gives the same rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_memkit.data.packing.best_fit import best_fit_packing
from lightning_memkit.data.packing.layout import Packing
from lightning_memkit.data.packing.pieces import LongDocuments, RowLimits, WorkLimit, checked_lengths
from lightning_memkit.data.sources.store import TokenStore
from lightning_memkit.data.sources.token_records import token_store

WINDOW_ROWS = 512


@dataclass(frozen=True, kw_only=True)
class StreamWindow:
    """Consecutive documents of a stream, and their rows.

    To continue in the middle of a window, ``first_document`` and the number of its rows that are done
    suffice.

    Attributes:
        first_document: The number of the window's first document in the stream.
        documents: Number of documents in the window, including those that are in no row.
        packing: Their rows. Documents are numbered from 0 at the window's first.
    """

    first_document: int
    documents: int
    packing: Packing


class StreamPacker:
    """Packs documents as they arrive, rows about 99.9 % full; holds the lengths of at most ``window_rows`` rows.

    Windows follow the documents' order; within a window rows are shuffled, because best-fit decreasing puts
    rows of few long documents first. Every window has ``window_rows`` rows as far as the documents' lengths
    allow: fewer at the stream's end and where a long document leaves gaps, more if one document alone needs
    them.

    Args:
        context: Tokens that a row can hold.
        long_documents: How a document longer than a row is treated; see ``pack``.
        work_limit: Limits the rows' attention work, too; see ``pack``.
        window_rows: Rows in a window. With more of them rows are fuller, but more tokens are held back: about
            one row in two windows is lost. With a multiple of the rows of a step, each window fills whole
            steps.
        seed: The seed of the order of rows within windows.
        first_document: The number of the first document that will be added: resumes a stream at a window.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        context: int,
        *,
        long_documents: LongDocuments = "error",
        work_limit: WorkLimit | None = None,
        window_rows: int = WINDOW_ROWS,
        seed: int = 0,
        first_document: int = 0,
    ) -> None:
        self._limits = RowLimits(context=context, long_documents=long_documents, work=work_limit)
        options = (("window_rows", window_rows, 1), ("seed", seed, 0), ("first_document", first_document, 0))
        for name, value, least in options:
            if value < least:
                raise ValueError(f"{name}={value} is below {least}; choose {least} or more.")
        self._window_tokens = window_rows * context
        self._window_rows = window_rows
        self._seed = seed
        self.first_document = first_document
        self._held: list[int] = []
        self._held_tokens = 0

    @property
    def held_documents(self) -> int:
        """Number of documents from ``first_document`` on that are in no window yet."""
        return len(self._held)

    def add(self, length: int) -> list[StreamWindow]:
        """Add the next document; returns the windows that it completes, mostly none.

        Raises:
            ValueError: it is too long under ``long_documents="error"``, or negative.
        """
        if not 0 <= length <= self._limits.longest:
            return self.extend([length])
        self._held.append(length)
        self._held_tokens += length
        return self._windows(np.array(self._held)) if self._held_tokens > self._window_tokens else []

    def extend(self, lengths: ArrayLike) -> list[StreamWindow]:
        """Add the next documents; returns the windows that they complete.

        Raises:
            ValueError: one is too long under ``long_documents="error"``, or negative; none is added then.
        """
        added = checked_lengths(lengths)
        self._limits.refuse(added, self.first_document + len(self._held))
        return self._windows(np.concatenate((np.array(self._held, np.int64), added.astype(np.int64))))

    def finish(self) -> list[StreamWindow]:
        """The windows of the documents that are still held at the stream's end."""
        return self._windows(np.array(self._held, np.int64), to_the_end=True)

    def _windows(self, lengths: NDArray[np.int64], *, to_the_end: bool = False) -> list[StreamWindow]:
        ends = np.cumsum(self._tokens(lengths))
        windows: list[StreamWindow] = []
        first, before = 0, 0
        while first < len(lengths):
            end = int(np.searchsorted(ends, before + self._window_tokens, side="right"))
            if end == len(lengths) and not to_the_end:
                break
            windows.append(self._largest_window(lengths[first : max(end, first + 1)]))
            first += windows[-1].documents
            self.first_document += windows[-1].documents
            before = int(ends[first - 1])
        self._held = lengths[first:].tolist()
        self._held_tokens = int(ends[-1]) - before if len(ends) else 0
        return windows

    def _largest_window(self, lengths: NDArray[np.int64]) -> StreamWindow:
        """A window of as many of the documents as fit in its rows, at least one."""
        ends = np.cumsum(self._tokens(lengths))
        number = len(lengths)
        while True:
            packing = best_fit_packing(lengths[:number], self._limits)
            surplus = packing.rows - self._window_rows
            if surplus <= 0 or number == 1:
                break
            # The tokens of the emptiest rows approximate what must wait for the next window.
            too_many = int(np.partition(packing.row_tokens, surplus - 1)[:surplus].sum())
            fewer = int(np.searchsorted(ends, ends[number - 1] - too_many, side="right"))
            number = max(1, min(number - 1, fewer))
        order = np.random.default_rng((self._seed, self.first_document)).permutation(packing.rows)
        return StreamWindow(
            first_document=self.first_document, documents=number, packing=packing.in_order(order)
        )

    def _tokens(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many tokens of each document get into rows."""
        keeps_all = self._limits.long_documents != "truncate"
        return lengths if keeps_all else np.minimum(lengths, self._limits.longest)


def packed_windows(
    documents: Iterable[Sequence[int] | NDArray[np.integer]], packer: StreamPacker
) -> Iterator[tuple[TokenStore, StreamWindow]]:
    """Yield the documents' tokens window by window, each with its rows: the input of ``collate``.

    Holds the tokens of one window. To resume, read on from the document ``window.first_document`` with a new
    ``StreamPacker(..., first_document=window.first_document)``, and skip the window's rows that are done.

    Args:
        documents: Token ids, one document after another; the stream may be endless.
        packer: How rows are filled; nothing was added to it yet.
    """
    held: list[Any] = []

    def stores(windows: list[StreamWindow]) -> Iterator[tuple[TokenStore, StreamWindow]]:
        for window in windows:
            store = token_store(held[: window.documents])
            del held[: window.documents]
            yield store, window

    for document in documents:
        held.append(document)
        yield from stores(packer.add(len(document)))
    yield from stores(packer.finish())

"""The limits of a row, and how documents that exceed them are split into chunks, truncated or refused."""

from dataclasses import dataclass, fields
from math import isqrt
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_memkit.data.sources.store import offsets_of
from lightning_memkit.utilities.given import refuse_no_number

LongDocuments = Literal["error", "split", "truncate"]


@dataclass(frozen=True, kw_only=True)
class WorkLimit:
    """Limits the computation of a row, so that rows take equal time even if equal tokens don't.

    A document's work is length * (length + ``linear``). Attention alone grows with the square of the length:
    ``linear=0``. A transformer block of width d takes about 2 * d * length² floating-point operations for
    causal attention and 24 * d² * length for its matrices: ``linear=12 * d``.

    Args:
        most: Work that a row can hold; 2048 * (2048 + linear) is the work of one document of 2048 tokens.
        linear: Work of a token besides attention, in units of a document's length.

    Raises:
        ValueError: ``linear`` is negative, or not even one token fits.
    """

    most: int
    linear: int = 0

    def __post_init__(self) -> None:
        for name in ("most", "linear"):
            refuse_no_number(name, getattr(self, name))
            object.__setattr__(self, name, int(getattr(self, name)))  # one of numpy's may overflow
        if self.linear < 0:
            raise ValueError(f"linear={self.linear} is below 0; 0 counts attention alone.")
        if self.most < 1 + self.linear:
            raise ValueError(
                f"most={self.most} is below {1 + self.linear}, the work of one token (linear={self.linear}); "
                f"length * (length + linear) is what a row for a document of so many tokens needs."
            )

    def of(self, length: int) -> int:
        """Work of a document of this length."""
        return length * (length + self.linear)

    def longest(self, work: int) -> int:
        """Length of the longest document whose work does not exceed this."""
        return (isqrt(self.linear**2 + 4 * work) - self.linear) // 2


@dataclass(frozen=True, kw_only=True)
class DocumentCounts:
    """Counts the documents that are not whole in a row.

    Attributes:
        split_documents: Documents too long for a row that became several chunks.
        truncated_documents: Documents too long for a row that lost their end.
        truncated_tokens: Tokens lost with those ends.
        empty_documents: Documents without a token, which are in no row.
    """

    split_documents: int = 0
    truncated_documents: int = 0
    truncated_tokens: int = 0
    empty_documents: int = 0

    @staticmethod
    def names() -> tuple[str, ...]:
        """The names of the counts."""
        return tuple(field.name for field in fields(DocumentCounts))


@dataclass(frozen=True, kw_only=True)
class RowLimits:
    """What a row can hold, and how longer documents are treated.

    Raises:
        ValueError: the context is below 1, or ``long_documents`` is unknown.
    """

    context: int
    long_documents: LongDocuments = "error"
    work: WorkLimit | None = None

    def __post_init__(self) -> None:
        refuse_no_number("context", self.context)
        object.__setattr__(self, "context", int(self.context))  # one of numpy's has no bit_length
        if self.context < 1:
            raise ValueError(
                f"context={self.context} is below 1; it is the number of tokens that a row can hold."
            )
        choices = get_args(LongDocuments)
        if self.long_documents not in choices:
            raise ValueError(f"long_documents={self.long_documents!r} is unknown; choose one of {choices}.")

    @property
    def longest(self) -> int:
        """Tokens of the longest chunk that fits in a row."""
        return self.context if self.work is None else min(self.context, self.work.longest(self.work.most))

    def refuse(self, lengths: NDArray[np.integer], first: int = 0) -> None:
        """Raise if a document is too long and ``long_documents`` is "error"; the first one has number `first`."""
        longest = int(lengths.max()) if lengths.size else 0
        if longest <= self.longest or self.long_documents != "error":
            return
        number = int(np.count_nonzero(lengths > self.longest))
        limit = f"context={self.context}"
        if self.longest < self.context:
            limit = f"the {self.longest} tokens that {self.work} admits"
        raise ValueError(
            f"{number:,} of {lengths.size:,} documents are longer than {limit} (number "
            f"{first + int(lengths.argmax()):,}, from 0, has {longest:,} tokens); a document must fit into a row. "
            'Raise the limit, or choose long_documents="split" (keeps all tokens) or "truncate" (drops the ends).'
        )


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The contents of rows: documents, or chunks of them.

    Attributes:
        documents: The document of each chunk; None if every document is one chunk, in order.
        starts: The first token of each chunk within its document, [pieces].
        lengths: The number of tokens of each chunk, [pieces].
        counts: Counts of the other documents.
    """

    documents: NDArray[np.integer] | None
    starts: NDArray[np.integer]
    lengths: NDArray[np.int32]
    counts: DocumentCounts


def checked_lengths(lengths: ArrayLike) -> NDArray[np.integer]:
    """The lengths as an array.

    Raises:
        ValueError: they are not one row of integers, or one is negative.
    """
    sizes = np.asarray(lengths)
    if sizes.ndim != 1 or not (np.issubdtype(sizes.dtype, np.integer) or sizes.size == 0):
        raise ValueError(f"lengths is {sizes.dtype} of shape {sizes.shape}; it must be one row of integers.")
    if sizes.size and int(sizes.min()) < 0:
        raise ValueError(f"lengths holds {int(sizes.min())}; a document's number of tokens is 0 or more.")
    return sizes


def cut(lengths: NDArray[np.integer], limits: RowLimits) -> Pieces:
    """Split the documents into chunks that fit in a row.

    Raises:
        ValueError: a document is too long under ``long_documents="error"``.
    """
    documents: NDArray | None = None  # None takes no memory while all documents are included, in order
    is_empty = lengths == 0
    empty = int(np.count_nonzero(is_empty))
    if empty:
        documents = np.flatnonzero(~is_empty).astype(index_type(len(lengths)))
        lengths = lengths[documents]
    limits.refuse(lengths)
    starts = np.broadcast_to(np.int32(0), lengths.shape)
    most = limits.longest
    longest = int(lengths.max()) if lengths.size else 0
    if longest <= most:
        counts = DocumentCounts(empty_documents=empty)
        lengths = lengths.astype(np.int32, copy=False)
        return Pieces(documents=documents, starts=starts, lengths=lengths, counts=counts)

    too_long = lengths > most
    number = int(np.count_nonzero(too_long))
    if limits.long_documents == "truncate":
        lost = int((lengths[too_long].astype(np.int64) - most).sum())
        counts = DocumentCounts(empty_documents=empty, truncated_documents=number, truncated_tokens=lost)
        lengths = np.minimum(lengths, most).astype(np.int32)
        return Pieces(documents=documents, starts=starts, lengths=lengths, counts=counts)

    parts = -(-lengths.astype(np.int64) // most)
    first = np.repeat(offsets_of(parts)[:-1], parts)
    begin = (np.arange(len(first)) - first) * most
    if documents is None:
        documents = np.arange(len(lengths), dtype=index_type(len(lengths)))
    return Pieces(
        documents=np.repeat(documents, parts),
        starts=begin.astype(index_type(longest)),
        lengths=np.minimum(np.repeat(lengths, parts) - begin, most).astype(np.int32),
        counts=DocumentCounts(empty_documents=empty, split_documents=number),
    )


def index_type(largest: int) -> type[np.signedinteger]:
    """The narrower of two integer dtypes that holds numbers up to ``largest``."""
    return np.int32 if largest < 2**31 else np.int64


def take(starts: NDArray, order: NDArray) -> NDArray:
    """``starts[order]``; if every chunk starts at token 0, the result still takes no memory."""
    if starts.strides == (0,) and len(order):
        return np.broadcast_to(starts[:1], order.shape)
    return starts[order]

"""Streams of records: documents that arrive one after another, in unknown number."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from lightning_memkit.data.sources.records import Encoder, RecordOptions
from lightning_memkit.data.sources.shares import DocumentOptions, is_of_share
from lightning_memkit.data.sources.source import Numbered, Source, SourcePart
from lightning_memkit.data.sources.store import TokenStore, offsets_of
from lightning_memkit.data.sources.tokenizers import Tokenizer

_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class StreamDocuments:
    """The documents of a stream that belong to a share, as tokens, read from any document number on.

    Attributes:
        source: An iterable that can be read again, or a function that returns an iterator.
        tokenizer: None if records are token ids.
        options: Which documents are read, and how.
        share: "train", "validation" or "test"; None takes all.
    """

    source: Any
    tokenizer: Tokenizer | None
    options: DocumentOptions
    share: str | None = None
    _encoder: Encoder = field(init=False, repr=False)

    def __post_init__(self) -> None:
        encoder = Encoder(source=_GivenStream(), tokenizer=self.tokenizer, options=self.options.records)
        object.__setattr__(self, "_encoder", encoder)

    def __call__(self, epoch: int, first_document: int) -> Iterator[TokenStore]:
        """Yield stores of consecutive documents; blank ones and those of other shares have no tokens."""
        records, number = _records(self.source, epoch, first_document), first_document
        while chunk := list(islice(records, _AT_ONCE)):
            yield self._store(chunk, number)
            number += len(chunk)

    def _store(self, records: list[Any], first: int) -> TokenStore:
        numbers = np.arange(first, first + len(records))
        wanted = np.array([not _is_blank(record, self.options.records) for record in records])
        if self.share is not None:
            wanted &= is_of_share(numbers, self.share, self.options)
        chosen = [(first + index, records[index]) for index in np.flatnonzero(wanted)]
        store = self._encoder(SourcePart(first=first, content=chosen, work=0))
        lengths = np.zeros(len(records), np.int64)
        lengths[wanted] = store.lengths
        return TokenStore(tokens=store.tokens, offsets=offsets_of(lengths), learned=store.learned)


def is_stream(source: Any) -> bool:
    """Whether a source's documents arrive one after another, in unknown number."""
    if isinstance(source, (str, bytes)) or hasattr(source, "__len__"):
        return False
    return hasattr(source, "__iter__") or callable(source)


def check_stream(source: Any) -> None:
    """Raise if a stream can be read only once: every epoch, every share and a resume read it again."""
    if hasattr(source, "__next__"):
        raise ValueError(
            f"source is {type(source).__name__}, which can be read only once, but every epoch, every share of the "
            "documents and a resume read it again; give the function that makes it: source=documents instead of "
            "source=documents()."
        )


def first_record(source: Any) -> Any:
    """The first record of a stream; None if it is empty."""
    return next(_records(source, 0, 0), None)


def _records(source: Any, epoch: int, first: int) -> Iterator[Any]:
    records: Any = source if hasattr(source, "__iter__") else source()
    if hasattr(records, "set_epoch"):
        records.set_epoch(epoch)
    if first and hasattr(records, "skip"):  # a stream of the datasets package may have a faster way
        return iter(records.skip(first))
    return islice(iter(records), first, None)


def _is_blank(record: Any, options: RecordOptions) -> bool:
    text = record.get(options.text_field) if hasattr(record, "get") else record
    return isinstance(text, str) and not text.strip()


class _GivenStream(Source):
    """A source whose parts already contain their records."""

    name, unit, work, identity = "the stream", "document", 0, None

    def parts(self) -> Iterator[SourcePart]:
        return iter(())

    def records(self, part: SourcePart) -> list[Numbered]:
        return part.content

"""Packs the documents of each data split ("share": train, validation, test) into rows, or into a stream of them."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_memkit.data.batching.batch_plan import refuse_long_rows
from lightning_memkit.data.batching.packed_rows import PackedRows
from lightning_memkit.data.batching.stream_batches import Stream
from lightning_memkit.data.packing.pack import LongDocuments, PackingMode, WorkLimit, pack
from lightning_memkit.data.sources.corpus import Corpus
from lightning_memkit.data.sources.file_names import files_named_twice
from lightning_memkit.data.sources.shares import deal_documents, drawn_documents
from lightning_memkit.data.sources.store import TokenStore
from lightning_memkit.data.sources.stream_source import StreamDocuments, check_stream, is_stream

_SHOWN = 3  # files in a warning


def vocabulary_of(corpus: Corpus, shares: Mapping[str, PackedRows | Stream]) -> int:
    """An upper bound (exclusive) of the token ids that were read.

    Raises:
        ValueError: the source is a stream of token ids, whose vocabulary is unknown.
    """
    if corpus.tokenizer is not None:
        return corpus.tokenizer.vocabulary_size
    stores = [rows.store for rows in shares.values() if isinstance(rows, PackedRows)]
    if not stores:
        raise ValueError(
            "source is a stream of token ids, which doesn't tell its vocabulary; take the tokenizer's."
        )
    return max(store.vocabulary for store in stores)


@dataclass(frozen=True, kw_only=True)
class SharePacking:
    """Reads the sources of the shares and packs them.

    Attributes:
        corpus: Reads the sources, with the options of their documents.
        verify: Compares a cached file with its checksums.
        context: Tokens that a row can hold.
        packing: How rows are filled.
        long_documents: How documents longer than the context are treated.
        work_limit: Limits the rows' attention work, too.
        multiple_of: Rounds a batch's length up to a multiple.
        batch_tokens: Tokens a step and rank: no row may be longer.
    """

    corpus: Corpus
    verify: bool
    context: int
    packing: PackingMode
    long_documents: LongDocuments
    work_limit: WorkLimit | None
    multiple_of: int
    batch_tokens: int | None

    def dealt(self, source: Any) -> dict[str, PackedRows | Stream]:
        """Divide one source among all shares."""
        documents = self.corpus.options
        if is_stream(source):
            wanted = {"train": True, "validation": documents.validation, "test": documents.test}
            return {share: self._stream(source, share) for share, part in wanted.items() if part}
        if (twice := files_named_twice(source)) and documents.validation + documents.test:
            warnings.warn(
                f"source names {', '.join(twice[:_SHOWN])} more than once, and reads it as often: of its documents, "
                "some are held out and trained on, too. Name it once, or give validation documents of their own: "
                "source={'train': [...], 'validation': ...}.",
                stacklevel=2,
            )
        store = self.corpus.read(source, verify=self.verify)
        return {
            share: self._rows(share, store, numbers)
            for share, numbers in deal_documents(store.documents, documents).items()
            if len(numbers) or share == "train"
        }

    def whole(self, share: str, source: Any) -> PackedRows | Stream:
        """Pack a source that belongs to one share alone."""
        if is_stream(source):
            return self._stream(source, None)
        store = self.corpus.read(source, verify=self.verify)
        return self._rows(share, store, drawn_documents(store.documents, self.corpus.options))

    def _rows(self, share: str, store: TokenStore, numbers: NDArray[np.int64]) -> PackedRows:
        try:
            packing = pack(
                store.lengths[numbers],
                self.context,
                packing=self.packing,
                long_documents=self.long_documents,
                work_limit=self.work_limit,
                seed=self.corpus.options.seed,
            )
        except ValueError as error:
            raise ValueError(f"In the share {share!r}: {error}") from None
        rows = PackedRows(
            store=store,
            packing=replace(packing, documents=numbers.astype(packing.documents.dtype)[packing.documents]),
            pad_id=self.corpus.pad_id,
            multiple_of=self.multiple_of,
            packed_by=self._packed_by(),
            made_from=self._made_from(),
        )
        refuse_long_rows(rows.longest_batch if len(rows) else 0, self.batch_tokens)
        return rows

    def _stream(self, source: Any, share: str | None) -> Stream:
        check_stream(source)
        options = self.corpus.options
        if self.packing != "stream":
            raise ValueError(
                f"source has no length, and packing={self.packing!r} needs all documents at once; take "
                'packing="stream", which packs them as they come, or give a list of them.'
            )
        if options.limit is not None:
            raise ValueError(
                f"limit={options.limit} draws among all documents, whose number a stream does not tell; end "
                "the stream earlier, or set the trainer's limit_train_batches."
            )
        tokenizer = self.corpus.tokenizer_for_stream(source)
        return Stream(
            read=StreamDocuments(source=source, tokenizer=tokenizer, options=options, share=share),
            context=self.context,
            long_documents=self.long_documents,
            seed=options.seed,
            pad_id=self.corpus.pad_id,
            multiple_of=self.multiple_of,
            work_limit=self.work_limit,
            made_from=self._made_from(),
        )

    def _packed_by(self) -> dict[str, Any]:
        """The options, besides documents and context, that determine the rows."""
        limit = None if self.work_limit is None else repr(self.work_limit)
        return {"packing": self.packing, "long_documents": self.long_documents, "work_limit": limit}

    def _made_from(self) -> dict[str, Any]:
        """The options, besides the source's contents, that determine the documents."""
        options, corpus = self.corpus.options, self.corpus
        names = ("text_field", "kind", "mask_prompt", "limit", "validation", "test")
        return {
            "tokenizer": "none: token ids" if corpus.tokenizer is None else corpus.tokenizer_name,
            **{name: getattr(options, name) for name in names},
        }

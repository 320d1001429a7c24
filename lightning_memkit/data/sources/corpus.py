"""Reads any source's documents into one store of tokens, with the tokenizer that made them, if any."""

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_memkit.data.sources.file_names import name_of, named_files, names_a_file
from lightning_memkit.data.sources.records import Encoder, kinds_of
from lightning_memkit.data.sources.shares import DocumentOptions
from lightning_memkit.data.sources.source import Listed
from lightning_memkit.data.sources.source_of import source_of
from lightning_memkit.data.sources.store import TokenStore
from lightning_memkit.data.sources.stream_source import first_record
from lightning_memkit.data.sources.token_records import token_store
from lightning_memkit.data.sources.tokenising import tokenised
from lightning_memkit.data.sources.tokenizers import Tokenizer, load_tokenizer, name_of_tokenizer
from lightning_memkit.utilities.given import shortened

SHARES = ("train", "validation", "test", "predict")


@dataclass(kw_only=True)
class Corpus:
    """Reads sources; loads the tokenizer when the first document needs one.

    Attributes:
        tokenizer_name: ``bytes``, or the name or path of a Hugging Face tokenizer.
        options: Which documents are read, and how.
        tokenizer: None as long as all documents were token ids.
    """

    tokenizer_name: str
    options: DocumentOptions
    tokenizer: Tokenizer | None = field(default=None, init=False)
    _first_is_ids: bool | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.tokenizer_name = name_of_tokenizer(self.tokenizer_name)

    @property
    def pad_id(self) -> int:
        """The token that fills the end of a row."""
        return self.tokenizer.pad_id if self.tokenizer else 0

    def read(self, source: Any, *, verify: bool = True) -> TokenStore:
        """Read all documents of a source; mapped from the cache if the source's contents can be identified.

        Args:
            source: ``python-stdlib``, a path or several, a table of ``datasets``, texts, records, or token ids.
            verify: compare a cached file with its checksums.

        Raises:
            ValueError: the source has no tokens, or a document can't be read.
        """
        store = self._store(source, verify)
        if len(store.tokens) == 0:
            files = named_files(source)
            name = str(source) if isinstance(source, (str, Path)) else name_of(files) if files else ""
            what = f"The source {name!r}" if name else "The source"
            raise ValueError(f"{what} holds {store.documents} documents and no token; give at least one.")
        return store

    def tokenizer_for_stream(self, source: Any) -> Tokenizer | None:
        """The tokenizer, if the stream's first record needs one.

        Raises:
            ValueError: the stream is empty.
        """
        record = first_record(source)
        if record is None:
            raise ValueError("source gives no document; give at least one.")
        if names_a_file(record) and os.path.exists(record):
            raise ValueError(
                f"source gives {os.fspath(record)!r} for a document, which is a file; give the documents that it "
                "holds, or a list of files instead of a stream."
            )
        tokenizer = self._tokenizer_for(record)
        self._tell_mixed(tokenizer)
        return tokenizer

    def _store(self, source: Any, verify: bool) -> TokenStore:
        if isinstance(source, TokenStore):
            return source
        read = source_of(source)
        part = next(read.parts(), None)
        if part is None:
            return token_store([])
        tokenizer = None
        if self.options.kind not in ("auto", "input_ids") or read.columns(part) is None:
            records = read.records(part)
            tokenizer = self._tokenizer_for(records[0][1] if records else "")
        self._tell_mixed(tokenizer)
        if tokenizer is None and isinstance(read, Listed):
            return token_store(source)
        encoder = Encoder(source=read, tokenizer=tokenizer, options=self.options.records)
        return tokenised(encoder, processes=self.options.processes, verify=verify)

    def _tell_mixed(self, tokenizer: Tokenizer | None) -> None:
        """Warn if one source holds token ids and another one texts; within a source this is refused."""
        is_ids = tokenizer is None
        if self._first_is_ids is None:
            self._first_is_ids = is_ids
        elif self._first_is_ids != is_ids:
            warnings.warn(
                f"One source holds token ids, and another texts, which tokenizer={self.tokenizer_name!r} reads: of "
                "whose vocabulary the ids are is not known. Tokenise all sources or none, unless they are that "
                "tokenizer's.",
                stacklevel=2,
            )

    def _tokenizer_for(self, record: Any) -> Tokenizer | None:
        kind = self.options.kind
        kinds = kinds_of(record, self.options.text_field) if kind == "auto" else [kind]
        if "input_ids" in kinds:
            return None
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(self.tokenizer_name)
        return self.tokenizer


def refuse_no_source(source: Any) -> None:
    """Raise for what can't be documents, or the sources of shares.

    Raises:
        ValueError: a key is no share, or a source is nothing, a number, bytes or an empty text.
    """
    for share, given in (shares_of(source) or {"": source}).items():
        if given is None or given == "" or isinstance(given, (int, float, bytes)):
            place = f"source[{share!r}]" if share else "source"
            raise ValueError(
                f"{place}={shortened(given)} is no source; give 'python-stdlib', the path of a file or folder, a list "
                "of texts, records or token ids, or a mapping of such for train, validation, test and predict."
            )


def shares_of(source: Any) -> dict[str, Any] | None:
    """The sources of a mapping by share (train, validation, ...); None if one source is to be divided among shares.

    Raises:
        ValueError: a key is no share, or there is nothing to train, validate, test or predict on.
    """
    if not isinstance(source, Mapping):
        return None
    unknown = [key for key in source if key not in SHARES]
    if unknown or not source:
        raise ValueError(
            f"source has the keys {list(source)}; a mapping gives a source for each of {', '.join(SHARES)}, or for "
            "some of them."
        )
    return dict(source)

"""Texts to token ids: bytes with no vocabulary file, or a Hugging Face tokenizer by name."""

import hashlib
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from lightning_memkit.data.corpora import text_of
from lightning_memkit.data.store import TokenStore, offsets_of, token_type
from lightning_memkit.errors import MissingPackageError

_TEXTS_AT_ONCE = 1000


class Tokenizer(Protocol):
    """What memkit asks of a tokenizer.

    Attributes:
        key: Names the tokenizer and its vocabulary; part of the name of a cache.
        vocabulary_size: Token ids are below this.
        pad_id: The token that fills a row's end.
    """

    key: str
    vocabulary_size: int
    pad_id: int

    def tokenize(self, texts: TokenStore) -> TokenStore:
        """Token ids of every text."""
        ...

    def decode(self, ids: ArrayLike) -> str:
        """The text of token ids."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255, between a begin (256) and an end (257); 258 pads: 259 in all.

    Any text has a tokenization and nothing is loaded, at 3 to 5 times the tokens of a trained vocabulary.
    """

    key = "bytes"
    bos_id, eos_id, pad_id = 256, 257, 258
    vocabulary_size = 259

    def tokenize(self, texts: TokenStore) -> TokenStore:
        """Token ids of every text."""
        offsets = texts.offsets + 2 * np.arange(texts.documents + 1)
        tokens = np.empty(int(offsets[-1]), np.uint16)
        is_byte = np.ones(len(tokens), bool)
        is_byte[offsets[:-1]] = is_byte[offsets[1:] - 1] = False
        tokens[offsets[:-1]], tokens[offsets[1:] - 1] = self.bos_id, self.eos_id
        tokens[is_byte] = texts.tokens
        return TokenStore(tokens=tokens, offsets=offsets)

    def decode(self, ids: ArrayLike) -> str:
        """The text of token ids; begin, end and padding have none."""
        values = np.asarray(ids)
        return values[values < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer of the ``transformers`` package, by name or path; an end token closes every document.

    Raises:
        MissingPackageError: ``transformers`` is not installed.
        ValueError: there is no such tokenizer.
    """

    def __init__(self, name: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise MissingPackageError("transformers", f"tokenizer={name!r}", "hf") from None
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"tokenizer={name!r} can't be loaded; give the name or the folder of a Hugging Face tokenizer, "
                f'or "bytes", which needs none. transformers says: {error}'
            ) from error
        self.vocabulary_size = len(self._tokenizer)
        self.eos_id: int | None = self._tokenizer.eos_token_id
        pad_id = self._tokenizer.pad_token_id
        self.pad_id = pad_id if pad_id is not None else self.eos_id or 0
        vocabulary = sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1])
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        described = backend.to_str() if backend is not None else repr(vocabulary)
        self.key = f"hf-{hashlib.sha256(f'{described}{self.eos_id}'.encode()).hexdigest()[:16]}"

    def tokenize(self, texts: TokenStore) -> TokenStore:
        """Token ids of every text."""
        pieces, lengths = [], []
        kind = token_type(self.vocabulary_size)
        for first in range(0, texts.documents, _TEXTS_AT_ONCE):
            batch = [text_of(texts, n) for n in range(first, min(first + _TEXTS_AT_ONCE, texts.documents))]
            for ids in self._tokenizer(batch, verbose=False)["input_ids"]:
                if self.eos_id is not None and (not ids or ids[-1] != self.eos_id):
                    ids = [*ids, self.eos_id]
                pieces.append(np.asarray(ids, dtype=kind))
                lengths.append(len(ids))
        tokens = np.concatenate(pieces) if pieces else np.zeros(0, kind)
        return TokenStore(tokens=tokens, offsets=offsets_of(np.array(lengths, np.int64)))

    def decode(self, ids: ArrayLike) -> str:
        """The text of token ids."""
        return self._tokenizer.decode(np.asarray(ids).tolist())


def load_tokenizer(name: str) -> Tokenizer:
    """``"bytes"``, or the name or path of a Hugging Face tokenizer."""
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)

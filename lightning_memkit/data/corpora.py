"""Texts from Python's own sources, as UTF-8 bytes in one flat store."""

from collections.abc import Iterable

import numpy as np

from lightning_memkit.data.cache import cached
from lightning_memkit.data.standard_library import corpus_name, standard_library_documents
from lightning_memkit.data.store import TokenStore, offsets_of


def python_stdlib() -> TokenStore:
    """The functions of the running Python's standard library; read once, then kept in the cache folder."""
    return cached(corpus_name(), lambda: [text_store(standard_library_documents())])


def text_store(documents: Iterable[str]) -> TokenStore:
    """Texts as UTF-8 bytes, one behind the other."""
    encoded = [document.encode("utf-8", errors="replace") for document in documents]
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return TokenStore(tokens=np.frombuffer(b"".join(encoded), np.uint8), offsets=offsets_of(lengths))


def text_of(texts: TokenStore, document: int) -> str:
    """One document of a store of texts."""
    return texts[document].tobytes().decode("utf-8")

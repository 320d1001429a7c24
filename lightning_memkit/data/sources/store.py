"""Documents concatenated in one array: no Python object per document, nothing for worker processes to copy."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_memkit.data.sources.checksums import checksum_of, crc_of

_LONG = 64  # tokens per span
_AT_ONCE = 2**22  # tokens that are copied while the largest label is searched for


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """The tokens of all documents in one flat array; 2 bytes a token up to a vocabulary of 65,536, otherwise 4.

    Attributes:
        tokens: uint16 or int32 [tokens].
        offsets: int64 [documents + 1]; document ``d`` is ``tokens[offsets[d]:offsets[d + 1]]``.
        learned: bool [tokens], which tokens are labels (a prompt's are not), at one more byte a token; None:
            all.
    """

    tokens: NDArray[np.integer]
    offsets: NDArray[np.int64]
    learned: NDArray[np.bool_] | None = None

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, [documents]."""
        return np.diff(self.offsets)

    @cached_property
    def vocabulary(self) -> int:
        """An upper bound (exclusive) of the token ids; 0 if there are no tokens."""
        return int(self.tokens.max()) + 1 if len(self.tokens) else 0

    @cached_property
    def labels(self) -> int:
        """An upper bound (exclusive) of the tokens that are labels: not a document's first, and not masked."""
        bound, firsts = 0, self.offsets[:-1]
        for begin in range(0, len(self.tokens), _AT_ONCE):
            end = min(begin + _AT_ONCE, len(self.tokens))
            tokens = np.array(self.tokens[begin:end])
            if self.learned is not None:
                tokens[~self.learned[begin:end]] = 0
            tokens[firsts[np.searchsorted(firsts, begin) : np.searchsorted(firsts, end)] - begin] = 0
            bound = max(bound, int(tokens.max()) + 1)
        return bound

    @cached_property
    def checksum(self) -> str:
        """Checksum of all tokens, document ends and label marks; one pass over them, once.

        Equal to that of the file to which the store would be written.
        """
        crcs = [crc_of(self.tokens, token_type(self.vocabulary)), crc_of(self.offsets)]
        return checksum_of([*crcs, crc_of(self.learned)] if self.learned is not None else crcs)

    def __getitem__(self, document: int) -> NDArray[np.integer]:
        if not 0 <= document < self.documents:
            raise IndexError(f"document {document} is outside 0 to {self.documents - 1}.")
        return self.tokens[self.offsets[document] : self.offsets[document + 1]]

    def read(
        self, begins: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[NDArray[np.integer], NDArray[np.bool_] | None]:
        """The tokens of these spans of the flat array, concatenated, and which of them are labels (None: all)."""
        if is_long(sizes):
            spans = list(zip(begins.tolist(), (begins + sizes).tolist(), strict=True))

            def spanned(values: NDArray) -> NDArray:
                return np.concatenate([values[begin:end] for begin, end in spans])
        else:
            places = ranges(begins, sizes)

            def spanned(values: NDArray) -> NDArray:
                return values[places]

        return spanned(self.tokens), None if self.learned is None else spanned(self.learned)


def joined(stores: Iterable[TokenStore]) -> TokenStore:
    """All documents of several stores in one store, in memory."""
    parts = [store for store in stores if store.documents]
    if not parts:
        return TokenStore(tokens=np.zeros(0, np.uint16), offsets=np.zeros(1, np.int64))
    learned = None
    if any(part.learned is not None for part in parts):
        learned = np.concatenate([learned_of(part) for part in parts])
    return TokenStore(
        tokens=np.concatenate([part.tokens for part in parts]),
        offsets=offsets_of(np.concatenate([part.lengths for part in parts])),
        learned=learned,
    )


def learned_of(store: TokenStore) -> NDArray[np.bool_]:
    """Which tokens of a store are labels, [tokens]."""
    return np.ones(len(store.tokens), np.bool_) if store.learned is None else store.learned


def token_type(vocabulary: int) -> type[np.integer]:
    """The narrowest dtype that holds the token ids 0 to ``vocabulary - 1``: uint16 or int32."""
    return np.uint16 if vocabulary <= 2**16 else np.int32


def offsets_of(lengths: NDArray) -> NDArray[np.int64]:
    """The offsets of consecutive items of these lengths, and the total: ``[0, 3, 2]`` → ``[0, 0, 3, 5]``."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))


def ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """``starts[i]``, ``starts[i] + 1``, ... ``counts[i]`` values for every i, concatenated."""
    offsets = offsets_of(counts)
    return np.repeat(starts - offsets[:-1], counts) + np.arange(offsets[-1])


def is_long(sizes: NDArray[np.int64]) -> bool:
    """Whether spans of these sizes are copied faster span by span than token by token."""
    return len(sizes) > 0 and sizes.mean() >= _LONG

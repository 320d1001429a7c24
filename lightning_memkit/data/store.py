"""Documents end to end in one array: no object a document, nothing for worker processes to copy."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """The tokens of all documents in one flat array; 2 bytes a token up to a vocabulary of 65,536, else 4.

    Attributes:
        tokens: uint8, uint16 or int32 [tokens].
        offsets: int64 [documents + 1]; document ``d`` is ``tokens[offsets[d]:offsets[d + 1]]``.
    """

    tokens: NDArray[np.integer]
    offsets: NDArray[np.int64]

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, [documents]."""
        return np.diff(self.offsets)

    def __getitem__(self, document: int) -> NDArray[np.integer]:
        if not 0 <= document < self.documents:
            raise IndexError(f"document {document} is outside 0 to {self.documents - 1}.")
        return self.tokens[self.offsets[document] : self.offsets[document + 1]]

    @staticmethod
    def of(documents: Iterable[Any]) -> "TokenStore":
        """A store of sequences of token ids, or of mappings that hold one under ``"input_ids"``.

        Raises:
            ValueError: a token id is negative or not an integer, or a record has no ``input_ids``.
        """
        arrays = [_token_ids(document, number) for number, document in enumerate(documents)]
        lengths = np.array([len(array) for array in arrays], dtype=np.int64)
        flat = np.concatenate(arrays) if arrays else np.zeros(0, np.uint16)
        if flat.size and int(flat.min()) < 0:
            raise ValueError(f"A token id is {int(flat.min())}; token ids are 0 or more.")
        largest = int(flat.max()) if flat.size else 0
        return TokenStore(tokens=flat.astype(token_type(largest + 1)), offsets=offsets_of(lengths))


def token_type(vocabulary: int) -> type[np.integer]:
    """The narrowest type that holds the token ids 0 to ``vocabulary - 1``: uint16 or int32."""
    return np.uint16 if vocabulary <= 2**16 else np.int32


def offsets_of(lengths: NDArray) -> NDArray[np.int64]:
    """Where each of so many things begins, and their end: ``[0, 3, 2]`` → ``[0, 0, 3, 5]``."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))


def _token_ids(document: Any, number: int) -> NDArray[np.integer]:
    if hasattr(document, "keys"):
        if "input_ids" not in document:
            raise ValueError(
                f"Record {number} has the fields {sorted(document)} and no 'input_ids'; tokenise it, or give "
                "the path of a .jsonl or .txt file."
            )
        document = document["input_ids"]
    ids = np.asarray(document)
    if ids.ndim != 1 or not (np.issubdtype(ids.dtype, np.integer) or ids.size == 0):
        raise ValueError(
            f"Document {number} is {ids.dtype} of shape {ids.shape}; a document is one row of integers."
        )
    return ids.astype(np.int64, copy=False)

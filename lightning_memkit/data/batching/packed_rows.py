"""Rows of a packing, indexed by their numbers: whole batches, or parts of one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lightning_memkit.data.batching.batch import PackedBatch
from lightning_memkit.data.batching.collate import collate, rounded_length
from lightning_memkit.data.batching.identity import rows_crc
from lightning_memkit.data.batching.progress import Progress
from lightning_memkit.data.batching.resharding import CutRows
from lightning_memkit.data.packing.layout import Packing
from lightning_memkit.data.sources.store import TokenStore, offsets_of


@dataclass(frozen=True, kw_only=True)
class PackedRows(Dataset[PackedBatch]):
    """Rows indexed by their numbers: ``rows[[3, 17]]`` is a batch of two.

    Attributes:
        store: The documents' tokens.
        packing: The contents of each row.
        pad_id: The token that fills the end of a row.
        multiple_of: Rounds a batch's length up, but never beyond the context.
        packed_by: The options that determine the packing, by name: a resume with others is refused.
        made_from: The sources of the documents, by name: explains to whoever resumes with other documents why
            they differ.
    """

    store: TokenStore
    packing: Packing
    pad_id: int = 0
    multiple_of: int = 1
    packed_by: Mapping[str, Any] = field(default_factory=dict)
    made_from: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.packing.rows

    def __getitem__(
        self, rows: "Sequence[int] | NDArray[np.integer] | RowsOfLength | CutRows"
    ) -> PackedBatch:
        length, packing = None, self.packing
        if isinstance(rows, RowsOfLength):
            rows, length = rows.rows, rows.length
        elif isinstance(rows, CutRows):
            rows, packing = range(len(rows)), rows.of(packing)
        return collate(
            self.store, packing, rows, pad_id=self.pad_id, multiple_of=self.multiple_of, length=length
        )

    def length_of(self, rows: NDArray[np.integer]) -> int:
        """Tokens in a row of the batch of these rows."""
        return rounded_length(
            int(self.packing.row_tokens[rows].max()), self.packing.context, self.multiple_of
        )

    def counted(self, rows: NDArray[np.integer] | CutRows) -> Progress:
        """For a batch of these rows: the documents that begin in it, its tokens, and its tokens with padding."""
        if isinstance(rows, CutRows):
            cut = replace(self, packing=rows.of(self.packing))
            return cut.counted(np.arange(len(rows)))
        return Progress(
            documents=int(self.row_documents[rows].sum()),
            tokens=int(self.packing.row_tokens[rows].sum()),
            room=len(rows) * self.length_of(rows),
        )

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What the rows deliver: checksums of the documents and of the rows, and the options that shape a batch."""
        return {
            "tokens_crc": self.store.checksum,
            "rows_crc": rows_crc(self.packing),
            "context": self.packing.context,
            "pad_id": self.pad_id,
            "multiple_of": self.multiple_of,
            **self.packed_by,
        }

    @cached_property
    def row_documents(self) -> NDArray[np.int64]:
        """Number of documents that begin in each row, [rows]."""
        running = offsets_of(self.packing.starts == 0)
        return running[self.packing.offsets[1:]] - running[self.packing.offsets[:-1]]

    @property
    def longest_batch(self) -> int:
        """Tokens in a row of the longest possible batch."""
        longest = int(self.packing.row_tokens.max()) if len(self) else self.packing.context
        return rounded_length(longest, self.packing.context, self.multiple_of)


@dataclass(frozen=True, kw_only=True)
class RowsOfLength:
    """Rows that are padded to a given length: a part of a batch."""

    rows: NDArray[np.integer]
    length: int

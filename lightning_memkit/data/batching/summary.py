"""Summarizes the packing of one share of the documents in a line."""

import numpy as np

from lightning_memkit.data.batching.packed_rows import PackedRows
from lightning_memkit.data.batching.stream_batches import Stream


def summary_line(share: str, rows: PackedRows | Stream) -> str:
    """Documents, tokens, rows, how full rows are, and how many documents were split, truncated or empty."""
    if isinstance(rows, Stream):
        return f"{share}: a stream, packed window by window into rows of {rows.context:,}"
    packing = rows.packing
    bound = packing.tokens / (packing.lower_bound_rows * packing.context) if packing.rows else 1.0
    documents = int(np.count_nonzero(packing.starts == 0))
    notes = [
        f"{packing.split_documents:,} split",
        f"{packing.truncated_documents:,} truncated ({packing.truncated_tokens:,} tokens dropped)",
        f"{packing.empty_documents:,} empty",
    ]
    return (
        f"{share}: {documents:,} documents, {packing.tokens:,} tokens in {packing.rows:,} rows of "
        f"{packing.context:,}, {packing.efficiency:.2%} full (at best {bound:.2%}); documents "
        + ", ".join(notes)
    )

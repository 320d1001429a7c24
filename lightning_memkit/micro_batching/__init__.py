"""Split a batch into micro-batches, and join their outputs into what the whole batch would have given."""

from lightning_memkit.micro_batching.rejoining import joined
from lightning_memkit.micro_batching.splitting import (
    IGNORED_LABEL,
    LABEL_NAMES,
    SplitError,
    SplittableBatch,
    WeighBy,
    Weigher,
    batch_size,
    even_sizes,
    find_labels,
    micro_batches,
    normalized,
    picked_rows,
    split_batch,
    weigher,
)

__all__ = [
    "IGNORED_LABEL",
    "LABEL_NAMES",
    "SplitError",
    "SplittableBatch",
    "WeighBy",
    "Weigher",
    "batch_size",
    "even_sizes",
    "find_labels",
    "joined",
    "micro_batches",
    "normalized",
    "picked_rows",
    "split_batch",
    "weigher",
]

"""Packing: takes documents' lengths and fills rows as full as possible; tokens are neither read nor moved."""

from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_memkit.data.packing.best_fit import best_fit_packing
from lightning_memkit.data.packing.layout import Packing, joined, laid_out
from lightning_memkit.data.packing.pieces import (
    LongDocuments,
    RowLimits,
    WorkLimit,
    checked_lengths,
    cut,
    index_type,
)
from lightning_memkit.data.packing.streaming import StreamPacker

__all__ = ["LongDocuments", "Packing", "PackingMode", "WorkLimit", "pack"]

PackingMode = Literal["bfd", "stream", "none"]


def pack(
    lengths: ArrayLike,
    context: int,
    *,
    packing: PackingMode = "bfd",
    long_documents: LongDocuments = "error",
    work_limit: WorkLimit | None = None,
    seed: int | None = None,
) -> Packing:
    """Pack documents into rows of at most ``context`` tokens; tokens are neither read nor moved.

    Args:
        lengths: Tokens of each document, [documents].
        context: Tokens that a row can hold.
        packing: ``"bfd"`` fills rows by best-fit decreasing over all documents. ``"stream"`` fills them
            window by window, each window with the next documents that fill 512 rows, as ``StreamPacker`` does
            with the same lengths. ``"none"`` gives each document its own row.
        long_documents: How a document longer than a row is treated. ``"error"`` refuses it, ``"split"``
            splits it into chunks of the most tokens that fit in a row and a remainder, ``"truncate"`` drops
            its end. The result counts what was split or dropped.
        work_limit: Limits the rows' attention work, too, so that rows take equal time. A document longer than it
            allows counts as long. None: only tokens are limited.
        seed: Shuffles the rows. None keeps the order of creation: under ``"bfd"`` the first rows hold one or two
            long documents and the last ones dozens of short ones, under ``"stream"`` windows follow the
            documents' order.

    Raises:
        ValueError: an option is unknown, a length is negative, or a document does not fit in a row under
            ``long_documents="error"``.
    """
    limits = RowLimits(context=context, long_documents=long_documents, work=work_limit)
    if packing not in get_args(PackingMode):
        raise ValueError(f"packing={packing!r} is unknown; choose one of {get_args(PackingMode)}.")
    sizes = checked_lengths(lengths)
    if packing == "bfd":
        packed = best_fit_packing(sizes, limits)
    elif packing == "none":
        packed = _one_a_row(sizes, limits)
    else:
        packed = _in_windows(sizes, limits)
    return packed if seed is None else packed.shuffled(seed)


def _one_a_row(lengths: NDArray[np.integer], limits: RowLimits) -> Packing:
    pieces = cut(lengths, limits)
    number = len(pieces.lengths)
    order = np.arange(number, dtype=index_type(number))
    return laid_out(pieces, (order, pieces.lengths, np.arange(number + 1, dtype=np.int64)), limits)


def _in_windows(lengths: NDArray[np.integer], limits: RowLimits) -> Packing:
    packer = StreamPacker(limits.context, long_documents=limits.long_documents, work_limit=limits.work)
    windows = [*packer.extend(lengths), *packer.finish()]
    if not windows:
        return best_fit_packing(lengths[:0], limits)
    kind = index_type(len(lengths))
    return joined([window.packing.numbered_from(window.first_document, kind) for window in windows])

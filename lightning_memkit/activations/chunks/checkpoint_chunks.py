"""Runs a module in chunks of rows or tokens, recomputed one by one in the backward."""

from torch import nn

from lightning_memkit.activations.chunks.forwards import ChunkedForwards, ChunkSizes
from lightning_memkit.utilities.patching import Undo


def checkpoint_chunks(module: nn.Module, rows: int | None = None, tokens: int | None = None) -> Undo:
    """Keep one chunk of a module's activations at a time; costs one more forward of the module.

    The module's forward runs without gradient, chunk by chunk, and what it gives is joined: the loss, hooks, metrics
    and counters see the whole batch, once. In the backward each chunk runs again, with gradient, and each parameter
    gets one gradient for all of them, summed in float32 if it has 16 bits. So any loss over the outputs is exact:
    contrastive ones, with negatives within the batch, too. Memory: the outputs and their gradients, and one chunk.

    Random numbers are drawn chunk by chunk and again in the recomputation: dropout has other masks than without
    chunks. A call of at most one chunk runs as it is. Without gradients the module runs in chunks, too.

    Args:
        module: rows (or tokens) must not act on each other in it; the first call with several chunks asks it, on a few
            of them, and refuses what batch statistics, attention over tokens or a mean over rows couple.
        rows: at most so many of the first dimension in a chunk. Every argument whose first dimension is as long as
            that of the first tensor is split; others are given whole.
        tokens: at most so many of the second dimension, also of one row. Where the module gets `cu_seqlens`, chunks
            end where documents do, and a document that is longer is a chunk of its own.

    Returns:
        The undo: calling it restores the forward.

    Raises:
        ValueError: neither size is given, one is less than 1, or the module is in chunks already.
        ChunkError: in the first call that has several chunks: rows or tokens act on each other, the forward changes
            the module's buffers or attributes, or it reads a tensor with a graph that is no argument.

    Source: Gao et al. 2021, arXiv:2101.06983 (gradient cache); sequence tiling as in ALST, arXiv:2506.13996.
    """
    for name, size in (("rows", rows), ("tokens", tokens)):
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"{name}={size!r} in a chunk; give a whole number from 1.")
    if rows is None and tokens is None:
        raise ValueError("No size of a chunk is given; give rows=..., tokens=..., or both.")
    forwards = ChunkedForwards(ChunkSizes(rows, tokens))
    put_back = forwards.patch(module)

    def undo() -> None:
        forwards.is_on = False  # if another patch lies over this one, it passes calls through from now on
        put_back()

    return undo

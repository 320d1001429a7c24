"""The backends that run everywhere: SDPA document by document, and SDPA with a tokens * tokens mask."""

import warnings
from itertools import groupby, pairwise

import torch
from torch import Tensor

from lightning_memkit.attention.documents import Documents, flat, numbers_of, plain, sdpa, unflat
from lightning_memkit.memory.units import format_bytes

_LEAST_BLOCK = 256  # queries at once under a window: with fewer, launches would dominate


def loop(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    """Attention once for each run of documents of equal length, on views."""
    bounds = documents.checked_bounds(query.size(0), query.size(2))
    lengths = (end - begin for begin, end in pairwise(bounds))
    runs = [(length, sum(1 for _ in same)) for length, same in groupby(lengths) if length]
    # One split instead of a slice for each document: each slice's backward fills a gradient of the whole
    # size.
    sizes = [length * count for length, count in runs]
    parts = zip(*(flat(x).split(sizes) for x in (query, key, value)), strict=True)
    outputs = []
    for (length, _), part in zip(runs, parts, strict=True):
        q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in part)
        outputs.append(flat(_whole_documents(q, k, v, documents)))
    return unflat(torch.cat(outputs) if len(outputs) > 1 else outputs[0], query)


def _whole_documents(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    """Attention over documents of one length, [documents, heads, length, head_dim]."""
    length = query.size(2)
    places = torch.arange(length, dtype=torch.int32, device=query.device)
    if documents.changes_scores:
        return plain(query, key, value, documents.visible(places[:, None], places), documents)
    if documents.window is None or length <= documents.window:
        return sdpa(query, key, value, documents)
    # A chunk of queries sees the keys within its window: length * window scores instead of length squared.
    size, reach = max(documents.window, _LEAST_BLOCK), documents.window - 1
    outputs = []
    for first, block in zip(range(0, length, size), query.split(size, 2), strict=True):
        last = first + block.size(2)
        begin, end = max(0, first - reach), min(length, last + (0 if documents.causal else reach))
        mask = documents.visible(places[first:last, None], places[begin:end])
        outputs.append(sdpa(block, key[:, :, begin:end], value[:, :, begin:end], documents, mask))
    return torch.cat(outputs, 2)


def dense_mask(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    """Attention with a mask of batch * tokens * tokens bytes; only for comparison, and warns."""
    batch, _, tokens, _ = query.shape
    documents.checked_bounds(batch, tokens)
    warnings.warn(
        f"backend='dense_mask' makes a mask of batch * tokens * tokens = {format_bytes(batch * tokens**2)}, and "
        'computes all scores that it hides; "loop" runs everywhere and makes no mask.',
        stacklevel=3,
    )
    numbers = numbers_of(documents.cu_seqlens.to(query.device), batch, tokens)
    places = torch.arange(tokens, device=query.device)
    mask = numbers[:, None, :, None] == numbers[:, None, None, :]
    mask = mask & documents.visible(places[:, None], places)
    if documents.changes_scores:
        return plain(query, key, value, mask, documents)
    return sdpa(query, key, value, documents, mask)

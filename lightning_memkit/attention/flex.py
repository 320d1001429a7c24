"""Compiled FlexAttention: float32 and score changes on a GPU; not yet verified on a GPU."""

import weakref
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.attention.documents import Documents, numbers_of

_BLOCK = 128
_last: tuple[Any, tuple[Any, ...], Any] | None = None


def flex(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    """FlexAttention over the flattened batch; its mask of blocks takes a bit for 128 * 128 pairs of tokens."""
    # One row of all documents: blocks of other rows are skipped like those of other documents.
    one_row = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value))
    out = _attention()(
        *one_row,
        score_mod=_score_change(documents, query.device),
        block_mask=_block_mask(documents, query),
        scale=documents.scale,
        enable_gqa=query.size(1) != key.size(1),
    )
    return out[0].unflatten(1, (query.size(0), query.size(2))).transpose(0, 1)


@lru_cache
def _attention() -> Any:
    """Compiled once: uncompiled it would make all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def _score_change(documents: Documents, device: torch.device) -> Any:
    slopes = documents.alibi_slopes
    if not documents.changes_scores:
        return None
    # As a tensor: a float would become a symbol of the compiled kernel, which can't take it.
    softcap = None if documents.softcap is None else torch.tensor(documents.softcap, device=device)

    def change(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if slopes is None else score - slopes[head] * (query - key).abs()

    return change


def _block_mask(documents: Documents, query: Tensor) -> Any:
    """The mask of blocks; made once for all layers, which share one `cu_seqlens`."""
    global _last
    bounds = documents.cu_seqlens
    key = (bounds._version, query.device, query.shape[0], query.shape[2], documents.window_size())
    if _last is not None and _last[0]() is bounds and _last[1] == key:
        return _last[2]
    from torch.nn.attention.flex_attention import create_block_mask

    numbers = numbers_of(bounds.to(query.device), query.size(0), query.size(2)).flatten()
    # Tensors, as above; and two comparisons, for the C++ of a compiled mask knows no abs of whole numbers.
    window = None if documents.window is None else torch.tensor(documents.window, device=query.device)

    def seen(row: Tensor, head: Tensor, query_place: Tensor, key_place: Tensor) -> Tensor:
        mask = numbers[query_place] == numbers[key_place]
        if documents.causal:
            mask = mask & (key_place <= query_place)
        if window is not None:
            mask = mask & (key_place - query_place < window) & (query_place - key_place < window)
        return mask

    total = numbers.numel()
    made = create_block_mask(seen, None, None, total, total, device=query.device, BLOCK_SIZE=_BLOCK)
    _last = (weakref.ref(bounds), key, made)
    return made

"""The entry to packed attention: checks its inputs and passes them to a backend.

All backends take [batch, heads, tokens, head_dim], like ``torch.nn.functional.scaled_dot_product_attention``
(SDPA).
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_memkit.attention.choice import choose, refusal
from lightning_memkit.attention.documents import Documents, sdpa
from lightning_memkit.attention.flex import flex
from lightning_memkit.attention.in_torch import dense_mask, loop
from lightning_memkit.attention.kernels import flash_attn, varlen

Backend = Literal["auto", "loop", "flash_attn", "varlen", "flex", "dense_mask"]

_BACKENDS = {
    "loop": loop,
    "dense_mask": dense_mask,
    "flash_attn": flash_attn,
    "varlen": varlen,
    "flex": flex,
}


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    max_seqlen: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Scaled dot-product attention in which no document sees another; saves no mask and no scores.

    Args:
        query: [batch, heads, tokens, head_dim].
        key: [batch, key_heads, tokens, head_dim]; ``key_heads`` divides ``heads`` (grouped queries).
        value: Like ``key``.
        cu_seqlens: int32 [segments + 1]: where documents begin in the flattened batch * tokens tokens, and
            the total. The end of every row also ends a document. None: every row is one document.
        max_seqlen: Length of the longest document. None: a kernel that needs it synchronizes, once a batch.
        causal: A token sees no token after it.
        scale: Factor of the scores; None: 1 / sqrt(head_dim).
        window: A token sees itself and the ``window - 1`` tokens before it (without ``causal`` also after it).
        dropout_p: Fraction of the weights that is dropped; pass 0 outside training.
        softcap: Scores become softcap * tanh(score / softcap), as in Gemma 2. The loop then saves every
            document's scores.
        alibi_slopes: [heads]; a score falls by slope * distance (https://arxiv.org/abs/2108.12409). The loop then
            saves every document's scores.
        backend: ``"loop"`` runs SDPA document by document, on every device. ``"flash_attn"`` (the package)
            and ``"varlen"`` (torch's own kernel) need half precision on CUDA, ``"flex"`` (compiled
            FlexAttention) needs CUDA. flash_attn is not yet verified on a GPU, the others are (H200).
            ``"dense_mask"`` allocates batch * tokens * tokens bytes. ``"auto"`` takes the first of flash_attn,
            varlen, flex, loop that can run; one that is named is used or refused, but
            for ``"flex"``: the loop takes batches of fewer than 128 tokens on CUDA, and all while operators are
            observed. For whole rows ``"auto"`` and ``"loop"`` call SDPA itself.

    Returns:
        [batch, heads, tokens, head_dim].

    Raises:
        ValueError: the backend is unknown or can't run on these tensors, an option is out of range, or shapes
            or ``cu_seqlens`` don't fit.
        MissingPackageError: the named backend's package is absent.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r} is unknown; choose one of {get_args(Backend)}.")
    _check(query, key, value, alibi_slopes)
    plain_rows = cu_seqlens is None and window is None and softcap is None and alibi_slopes is None
    documents = Documents(
        cu_seqlens=_rows(query) if cu_seqlens is None else cu_seqlens,
        max_seqlen=query.size(2) if cu_seqlens is None else max_seqlen,
        causal=causal,
        scale=scale,
        window=window,
        dropout_p=dropout_p,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )
    if plain_rows and backend in ("auto", "loop"):
        return sdpa(query, key, value, documents)
    if query.size(2) != key.size(2):
        raise ValueError(
            f"{query.size(2)} queries face {key.size(2)} keys; packed documents have as many of each. For decoding "
            'against a cache leave out cu_seqlens: then backend="auto" and "loop" know more keys than queries.'
        )
    chosen = choose(query, value, documents) if backend == "auto" else backend
    if (reason := refusal(chosen, query, value, documents)) is not None:
        raise reason
    return _BACKENDS[chosen](query, key, value, documents)


def _check(query: Tensor, key: Tensor, value: Tensor, alibi_slopes: Tensor | None) -> None:
    batch, features = query.size(0), query.size(-1)
    if query.dim() != 4:
        raise ValueError(f"query has the shape {tuple(query.shape)}; it is [batch, heads, tokens, head_dim].")
    if key.dim() != 4 or (key.size(0), key.size(3)) != (batch, features):
        raise ValueError(
            f"key has the shape {tuple(key.shape)}; it is [{batch}, key_heads, tokens, {features}], like the query."
        )
    if value.shape[:3] != key.shape[:3] or value.dim() != 4:
        raise ValueError(
            f"value has the shape {tuple(value.shape)}; it is {[*key.shape[:3]]} and the features, like the key."
        )
    if query.size(1) % key.size(1):
        raise ValueError(
            f"{query.size(1)} query heads can't share {key.size(1)} key heads; the latter divide the former."
        )
    if alibi_slopes is not None and alibi_slopes.shape != (query.size(1),):
        raise ValueError(
            f"alibi_slopes has the shape {tuple(alibi_slopes.shape)}; it is ({query.size(1)},): a slope a query head."
        )


def _rows(query: Tensor) -> Tensor:
    """The bounds of documents that are whole rows."""
    return torch.arange(query.size(0) + 1, dtype=torch.int32, device=query.device) * query.size(2)

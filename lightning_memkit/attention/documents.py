"""The inputs of every backend beside query, key and value, and the shapes that backends share."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class OfLastBatch:
    """Caches a value made from the last batch's `cu_seqlens` while that lives, so that all layers share it."""

    def __init__(self) -> None:
        self._last: tuple[Any, int, Any, Any] | None = None

    def of(self, cu_seqlens: Tensor, key: Any, make: Callable[[], Any]) -> Any:
        """The cached value; calls `make` again for other bounds, bounds that were written to, or another key."""
        # A compiled graph must not capture one batch's value, and inference tensors have no version counter.
        if torch.compiler.is_compiling() or cu_seqlens.is_inference():
            return make()
        last, version = self._last, cu_seqlens._version
        if last is not None and last[0]() is cu_seqlens and last[1:3] == (version, key):
            return last[3]
        made = make()
        self._last = (weakref.ref(cu_seqlens), version, key, made)
        return made


_longest, _bounds = OfLastBatch(), OfLastBatch()


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Where documents begin and end, and how scores are computed; see `packed_attention`."""

    cu_seqlens: Tensor
    max_seqlen: int | None = None
    causal: bool = True
    scale: float | None = None
    window: int | None = None
    dropout_p: float = 0.0
    softcap: float | None = None
    alibi_slopes: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"window={self.window} is below 1; a token sees at least itself. None: no window."
            )
        if not 0 <= self.dropout_p < 1:
            raise ValueError(f"dropout_p={self.dropout_p} is outside [0, 1); for 10 % write 0.1.")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap={self.softcap} is not above 0; None: the scores have no cap.")

    @property
    def changes_scores(self) -> bool:
        """Whether scores are more than a scaled product, so that torch's SDPA can't compute them."""
        return self.softcap is not None or self.alibi_slopes is not None

    def bounds(self) -> tuple[Tensor, Tensor, int, int]:
        """The bounds of queries and keys as the kernels take them."""
        longest = self.longest()
        return self.cu_seqlens, self.cu_seqlens, longest, longest

    def longest(self) -> int:
        """Length of the longest document; without `max_seqlen` it synchronizes with the device once a batch."""
        if self.max_seqlen is not None:
            return self.max_seqlen
        return _longest.of(self.cu_seqlens, None, lambda: int(self.cu_seqlens.diff().max()))

    def window_size(self) -> tuple[int, int]:
        """How many tokens before and after it a token sees, as the kernels take it; -1 means all."""
        before = -1 if self.window is None else self.window - 1
        return before, 0 if self.causal else before

    def checked_bounds(self, batch: int, tokens: int) -> tuple[int, ...]:
        """``cu_seqlens`` on the host; synchronizes with the device once a batch.

        Raises:
            ValueError: they don't cover the batch, or a document crosses the end of a row.
        """
        return _bounds.of(self.cu_seqlens, (batch, tokens), lambda: self._read_bounds(batch, tokens))

    def _read_bounds(self, batch: int, tokens: int) -> tuple[int, ...]:
        given = self.cu_seqlens
        if given.dim() != 1 or given.is_floating_point():
            raise ValueError(
                f"cu_seqlens is {given.dtype} of shape {tuple(given.shape)}; it is one row of integers."
            )
        bounds = tuple(given.tolist())
        if not bounds or bounds[0] != 0 or bounds[-1] != batch * tokens:
            ends = f"runs from {bounds[0]} to {bounds[-1]}" if bounds else "is empty"
            raise ValueError(f"cu_seqlens {ends}; it runs from 0 to batch * tokens = {batch * tokens}.")
        for begin, end in pairwise(bounds):
            if end < begin:
                raise ValueError(
                    f"cu_seqlens falls from {begin} to {end}; a document begins where the one before it ends."
                )
            row_end = (begin // tokens + 1) * tokens
            if end > row_end:
                raise ValueError(
                    f"cu_seqlens goes from {begin} to {end} across the end of a row, {row_end}; the end of every row "
                    "ends a document."
                )
        return bounds

    def visible(self, query_places: Tensor, key_places: Tensor) -> Tensor:
        """Which keys of its document a query sees, by the positions of both; broadcasts."""
        ahead = key_places - query_places
        seen = ahead <= 0 if self.causal else torch.ones_like(ahead, dtype=torch.bool)
        if self.window is not None:
            seen = seen & (ahead.abs() < self.window)
        return seen


def numbers_of(cu_seqlens: Tensor, batch: int, tokens: int) -> Tensor:
    """The index of each token's document, int64 [batch, tokens]."""
    places = torch.arange(batch * tokens, device=cu_seqlens.device)
    return torch.bucketize(places, cu_seqlens[1:].to(places), right=True).view(batch, tokens)


def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, documents: Documents) -> Tensor:
    """Attention by its formula, for scores that SDPA can't compute; saves several heads * tokens * tokens matrices.

    Args:
        query: [batch, heads, tokens, head_dim]; key and value may have fewer heads.
        key: like ``query``.
        value: like ``query``.
        mask: bool, broadcasts to [batch, heads, tokens, tokens]; True where a query sees a key.
        documents: how scores are computed.
    """
    groups = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    scale = query.size(-1) ** -0.5 if documents.scale is None else documents.scale
    # Half-precision scores would lose differences that the softmax needs; kernels compute them in float32,
    # too.
    scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scale
    if documents.softcap is not None:
        scores = documents.softcap * torch.tanh(scores / documents.softcap)
    if documents.alibi_slopes is not None:
        places = torch.arange(query.size(2), device=query.device)
        distance = (places[:, None] - places).abs()
        scores = scores - documents.alibi_slopes.to(scores)[:, None, None] * distance
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(value.dtype)
    return F.dropout(weights, documents.dropout_p) @ value


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, mask: Tensor | None = None
) -> Tensor:
    """SDPA with the documents' scale and dropout; a mask replaces causality."""
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=documents.dropout_p,
        is_causal=documents.causal and mask is None,
        scale=documents.scale,
        enable_gqa=query.size(1) != key.size(1),
    )


def flat(x: Tensor) -> Tensor:
    """[batch, heads, tokens, head_dim] → [batch * tokens, heads, head_dim]; a view if the tensor is a projection's."""
    return x.transpose(1, 2).flatten(0, 1)


def unflat(x: Tensor, query: Tensor) -> Tensor:
    """[batch * tokens, heads, head_dim] → [batch, heads, tokens, head_dim]."""
    return x.unflatten(0, (query.size(0), query.size(2))).transpose(1, 2)

"""Attention that stays within each document of a packed batch; memory grows with tokens, not tokens squared.

One front door, a backend a function. All take [batch, heads, tokens, head_dim], like
``torch.nn.functional.scaled_dot_product_attention`` (SDPA).
"""

import inspect
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import groupby
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_memkit.errors import MissingPackageError

Backend = Literal["auto", "loop", "flash_attn", "varlen", "dense_mask"]


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    max_seqlen: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Scaled dot-product attention in which no document sees another; it saves no mask and no scores.

    Args:
        query: [batch, heads, tokens, head_dim].
        key: [batch, key_heads, tokens, head_dim]; ``key_heads`` divides ``heads`` (grouped queries).
        value: Like ``key``.
        cu_seqlens: int32 [segments + 1]: where documents begin in the flattened batch * tokens tokens, and
            their end. The end of every row ends a document too. None: every row is one document, which is
            torch's SDPA whatever the backend.
        max_seqlen: The longest document. None: a kernel that asks for it waits for the GPU.
        causal: A token sees none after it.
        scale: Of the scores; None: 1 / sqrt(head_dim).
        backend: ``"loop"`` is SDPA document by document and runs everywhere. ``"flash_attn"`` (the package)
            and ``"varlen"`` (torch's own kernel) need half precision on CUDA and are not yet verified on GPU.
            ``"dense_mask"`` spends batch * tokens * tokens bytes. ``"auto"`` takes the first of flash_attn,
            varlen, loop that can run; one that is named is used or refused, never replaced.

    Returns:
        [batch, heads, tokens, head_dim].

    Raises:
        ValueError: the backend is unknown or can't run on these tensors; shapes or ``cu_seqlens`` don't fit.
        MissingPackageError: ``backend="flash_attn"`` and the package is absent.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend={backend!r} is unknown; choose one of {get_args(Backend)}.")
    if query.size(1) % key.size(1):
        raise ValueError(
            f"{query.size(1)} query heads can't share {key.size(1)} key heads; the latter divide the former."
        )
    if cu_seqlens is None:
        return _sdpa(query, key, value, is_causal=causal, scale=scale)
    if query.size(2) != key.size(2):
        raise ValueError(
            f"{query.size(2)} queries face {key.size(2)} keys; packed documents have as many of each. "
            "For decoding against a cache leave out cu_seqlens."
        )
    chosen = _choose(query) if backend == "auto" else backend
    if (refusal := _refusal(chosen, query)) is not None:
        raise refusal
    return _BACKENDS[chosen](query, key, value, _Documents(cu_seqlens, max_seqlen, causal, scale))


@dataclass(frozen=True)
class _Documents:
    """What every backend is told beside query, key and value."""

    cu_seqlens: Tensor
    max_seqlen: int | None
    causal: bool
    scale: float | None

    def bounds(self) -> tuple[Tensor, Tensor, int, int]:
        """The bounds of queries and keys as the kernels take them."""
        longest = int(self.cu_seqlens.diff().max()) if self.max_seqlen is None else self.max_seqlen
        return self.cu_seqlens, self.cu_seqlens, longest, longest


def _loop(query: Tensor, key: Tensor, value: Tensor, documents: _Documents) -> Tensor:
    """SDPA once for every run of documents of equal length, on views."""
    bounds = documents.cu_seqlens.tolist()
    tokens = query.size(0) * query.size(2)
    if bounds[0] != 0 or bounds[-1] != tokens:
        raise ValueError(
            f"cu_seqlens runs from {bounds[0]} to {bounds[-1]}; it runs from 0 to batch * tokens = {tokens}."
        )
    lengths = (end - begin for begin, end in zip(bounds, bounds[1:], strict=False))
    runs = [(length, sum(1 for _ in same)) for length, same in groupby(lengths) if length]
    # One split, not a slice a document: a slice's backward fills a gradient of the whole size each time.
    sizes = [length * count for length, count in runs]
    parts = zip(*(_flat(x).split(sizes) for x in (query, key, value)), strict=True)
    outputs = []
    for (length, _), part in zip(runs, parts, strict=True):
        q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in part)
        outputs.append(_flat(_sdpa(q, k, v, is_causal=documents.causal, scale=documents.scale)))
    return _unflat(torch.cat(outputs) if len(outputs) > 1 else outputs[0], query)


def _dense_mask(query: Tensor, key: Tensor, value: Tensor, documents: _Documents) -> Tensor:
    """SDPA with a mask of batch * tokens * tokens bytes; for comparison."""
    batch, _, tokens, _ = query.shape
    places = torch.arange(batch * tokens, device=query.device)
    ends = documents.cu_seqlens[1:].to(places)
    document = torch.bucketize(places, ends, right=True).view(batch, tokens)
    mask = document[:, None, :, None] == document[:, None, None, :]
    if documents.causal:
        mask = mask & torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
    return _sdpa(query, key, value, attn_mask=mask, scale=documents.scale)


def _flash_attn(query: Tensor, key: Tensor, value: Tensor, documents: _Documents) -> Tensor:
    """The flash-attn package (https://github.com/Dao-AILab/flash-attention); not yet verified on GPU."""
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    options = {"causal": documents.causal, "softmax_scale": documents.scale}
    flat = flash_attn_varlen_func(_flat(query), _flat(key), _flat(value), *documents.bounds(), **options)
    return _unflat(flat, query)


def _varlen(query: Tensor, key: Tensor, value: Tensor, documents: _Documents) -> Tensor:
    """The kernel of ``torch.nn.attention.varlen``; not yet verified on GPU."""
    from torch.nn.attention.varlen import varlen_attn

    # Its arguments differ by version: 2.10 says is_causal, 2.12 a window. By default both see everything.
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {}
    if "is_causal" in known:
        options["is_causal"] = documents.causal
    else:
        options["window_size"] = (-1, 0) if documents.causal else (-1, -1)
    if query.size(1) != key.size(1):
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        else:
            groups = query.size(1) // key.size(1)
            key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    if "scale" in known:
        options["scale"] = documents.scale
    elif documents.scale is not None:
        query = query * (documents.scale * query.size(-1) ** 0.5)
    flat: Any = varlen_attn(_flat(query), _flat(key), _flat(value), *documents.bounds(), **options)
    return _unflat(flat, query)


_BACKENDS = {"loop": _loop, "dense_mask": _dense_mask, "flash_attn": _flash_attn, "varlen": _varlen}


def _choose(query: Tensor) -> str:
    return next(name for name in ("flash_attn", "varlen", "loop") if _refusal(name, query) is None)


def _refusal(backend: str, query: Tensor) -> Exception | None:
    """Why the backend can't run on these tensors."""
    if backend in ("loop", "dense_mask"):
        return None
    half = query.dtype in (torch.bfloat16, torch.float16)
    if query.device.type != "cuda" or not half or torch.cuda.get_device_capability(query.device) < (8, 0):
        return ValueError(
            f"backend={backend!r} can't run on {query.dtype} on {query.device}; it needs bfloat16 or float16 "
            'on a CUDA device of capability 8.0 or higher. "auto" and "loop" run everywhere.'
        )
    if backend == "flash_attn" and not _importable("flash_attn"):
        return MissingPackageError("flash-attn", "backend='flash_attn'", "flash")
    if backend == "varlen" and not _importable("torch.nn.attention.varlen"):
        return ValueError(f'backend="varlen" is not part of torch {torch.__version__}; take "auto".')
    return None


@lru_cache
def _importable(module: str) -> bool:
    return find_spec(module) is not None


def _sdpa(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    grouped = query.size(1) != key.size(1)
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped, **options)


def _flat(x: Tensor) -> Tensor:
    """[batch, heads, tokens, head_dim] → [batch * tokens, heads, head_dim]; of a projection it is a view."""
    return x.transpose(1, 2).flatten(0, 1)


def _unflat(flat: Tensor, query: Tensor) -> Tensor:
    return flat.unflatten(0, (query.size(0), query.size(2))).transpose(1, 2)

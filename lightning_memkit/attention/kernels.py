"""The GPU backends: flash-attn's and torch's kernels for variable lengths."""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.attention.documents import Documents, flat, unflat


def flash_attn(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    """The flash-attn package (https://github.com/Dao-AILab/flash-attention); not yet verified on a GPU."""
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    options: dict[str, Any] = {
        "causal": documents.causal,
        "softmax_scale": documents.scale,
        "dropout_p": documents.dropout_p,
        "window_size": documents.window_size() if documents.window is not None else (-1, -1),
    }
    if documents.softcap is not None:
        options["softcap"] = documents.softcap
    if documents.alibi_slopes is not None:
        options["alibi_slopes"] = documents.alibi_slopes.float()
    if torch.are_deterministic_algorithms_enabled():  # otherwise its backward adds with atomics; since 2.4.1
        options["deterministic"] = True
    out = flash_attn_varlen_func(flat(query), flat(key), flat(value), *documents.bounds(), **options)
    return unflat(out, query)


def varlen(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    """The kernel of ``torch.nn.attention.varlen``."""
    from torch.nn.attention.varlen import varlen_attn

    # Its arguments differ by version: 2.10 has is_causal, 2.12 has a window. By default both see everything.
    known = _options_of(varlen_attn)
    options: dict[str, Any] = {}
    if "is_causal" in known:
        options["is_causal"] = documents.causal
    if "is_causal" not in known or documents.window is not None:
        options["window_size"] = documents.window_size()
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
    out: Any = varlen_attn(flat(query), flat(key), flat(value), *documents.bounds(), **options)
    return unflat(out, query)


def varlen_knows_windows() -> bool:
    """Whether this torch's kernel takes a window."""
    from torch.nn.attention.varlen import varlen_attn

    return "window_size" in _options_of(varlen_attn)


@lru_cache
def _options_of(function: Callable[..., Any]) -> frozenset[str]:
    """A function's parameter names; cached, because reading them takes as long as several kernels."""
    return frozenset(inspect.signature(function).parameters)

"""Compiled FlexAttention: float32 and score changes. Last verified on GPU: 2026-11-27, H200, torch 2.11.

That batches of fewer than 128 tokens take the loop is not yet verified there.
"""

from functools import lru_cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_memkit.attention.documents import Documents, OfLastBatch, numbers_of
from lightning_memkit.attention.flex_blocks import block_tables
from lightning_memkit.attention.in_torch import loop
from lightning_memkit.utilities.tensors import sent

_masks = OfLastBatch()
_FEWEST = 128  # below it torch takes `flex_decoding`


def flex(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    """FlexAttention over the flattened batch; its mask takes at most 1 MiB at 65,536 tokens.

    While operators are observed (`selective` activation checkpointing, a metered step) it runs the loop over
    documents: torch compiles nothing then, and uncompiled FlexAttention computes all scores. It runs the loop
    for fewer than 128 tokens on CUDA, too: torch compiles its kernel for so few tokens once for each length, and
    from the ninth length on (`torch._dynamo.config.recompile_limit`) runs it uncompiled.
    """
    is_traced = torch.compiler.is_compiling() or isinstance(query, FakeTensor)
    if _is_short(query) or (not is_traced and torch._C._len_torch_dispatch_stack()):
        return loop(query, key, value, documents)
    # One row holds all documents: blocks of other rows are skipped like those of other documents.
    one_row = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value))
    out = _attention(_signature(query, key, value, documents))(
        *one_row,
        score_mod=_score_change(documents, query.device),
        block_mask=_block_mask(documents, query),
        scale=documents.scale,
        enable_gqa=query.size(1) != key.size(1),
    )
    return out[0].unflatten(1, (query.size(0), query.size(2))).transpose(0, 1)


def _is_short(query: Tensor) -> bool:
    return query.device.type == "cuda" and query.size(0) * query.size(2) < _FEWEST


def _signature(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> tuple[Any, ...]:
    """Everything that requires a new compilation: all but the number of tokens."""
    tensors = [(x.size(1), x.size(3), x.dtype, x.device, x.requires_grad) for x in (query, key, value)]
    options = documents.softcap, documents.alibi_slopes, documents.window
    given = [option is not None for option in options]
    return (*tensors, *given, documents.causal, documents.scale, torch.is_grad_enabled())


@lru_cache(maxsize=256)
def _attention(signature: tuple[Any, ...]) -> Any:
    """FlexAttention, compiled once for each signature: uncompiled it would compute all scores.

    torch compiles a function's code for at most eight signatures (`torch._dynamo.config.recompile_limit`),
    and runs it uncompiled for the ninth. So each signature gets its own copy of the code, as
    `torch.compile(isolate_recompiles=True)` does, which torch 2.11 does not have.
    """
    from torch.nn.attention.flex_attention import flex_attention

    theirs: Any = flex_attention
    own = FunctionType(
        theirs.__code__.replace(),
        theirs.__globals__,
        theirs.__name__,
        theirs.__defaults__,
        theirs.__closure__,
    )
    own.__kwdefaults__ = theirs.__kwdefaults__
    return torch.compile(own, dynamic=True)


def _score_change(documents: Documents, device: torch.device) -> Any:
    slopes = documents.alibi_slopes
    if not documents.changes_scores:
        return None
    # A tensor: a float would become a symbol of the compiled kernel, which does not accept one.
    softcap = _filled_in(documents.softcap, device)

    def change(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if slopes is None else score - slopes[head] * (query - key).abs()

    return change


def _block_mask(documents: Documents, query: Tensor) -> Any:
    """The block mask; made once for all layers, which share one `cu_seqlens`."""
    key = (query.device, query.size(0), query.size(2), documents.window_size())
    return _masks.of(documents.cu_seqlens, key, lambda: _made(documents, query))


def _made(documents: Documents, query: Tensor) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    batch, tokens, device = query.size(0), query.size(2), query.device
    bounds = np.array(documents.checked_bounds(batch, tokens))  # synchronizes with the device
    tables = block_tables(documents, bounds)
    numbers = numbers_of(documents.cu_seqlens.to(device), batch, tokens).flatten()
    numbers = numbers.to(torch.int32)  # half as many bytes
    # A tensor, as above; and two comparisons, since a compiled mask's C++ has no abs of integers.
    window = _filled_in(documents.window, device)

    def seen(row: Tensor, head: Tensor, query_place: Tensor, key_place: Tensor) -> Tensor:
        mask = numbers[query_place] == numbers[key_place]
        if documents.causal:
            mask = mask & (key_place <= query_place)
        if window is not None:
            mask = mask & (key_place - query_place < window) & (query_place - key_place < window)
        return mask

    def there(array: np.ndarray) -> Tensor:
        table = torch.from_numpy(array)
        return (table.clone() if device.type == "cpu" else sent(table, device))[None, None]

    def places(array: np.ndarray) -> Tensor:
        return there(array) if device.type != "cpu" else _as_wide_as_long(array)[None, None]

    return BlockMask(
        seq_lengths=(batch * tokens, batch * tokens),
        kv_num_blocks=there(tables.seen.counts),
        kv_indices=places(tables.seen.places),
        full_kv_num_blocks=there(tables.seen_whole.counts),
        full_kv_indices=places(tables.seen_whole.places),
        q_num_blocks=there(tables.seeing.counts),
        q_indices=places(tables.seeing.places),
        full_q_num_blocks=there(tables.seeing_whole.counts),
        full_q_indices=places(tables.seeing_whole.places),
        BLOCK_SIZE=(tables.size, tables.size),
        mask_mod=seen,
    )


def _filled_in(value: float | None, device: torch.device) -> Tensor | None:
    """A number on the device, written there by a kernel: for a copy from the host, the host would wait."""
    return None if value is None else torch.full((), value, device=device)


def _as_wide_as_long(places: np.ndarray) -> Tensor:
    """Widen a table by letting its rows overlap the following ones, which needs almost no memory.

    torch's CPU kernel refuses tables that are narrower than long, though it reads only as far as a row's
    count.
    """
    blocks, most = places.shape
    room = torch.zeros(blocks * most + max(0, blocks - most), dtype=torch.int32)
    room[: blocks * most] = torch.from_numpy(places).flatten()
    return room.as_strided((blocks, max(blocks, most)), (most, 1))

"""Infers what a token sees in its own document from a function that masks pairs of tokens."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_CHECKED_QUERIES = 4096


def pattern_of(
    bounds: Tensor,
    *,
    batch_size: int,
    q_length: int,
    mask_function: Callable[..., Any],
    local_size: int | None = None,
) -> tuple[bool, int | None] | None:
    """Whether attention within documents is causal, and its window; None if the pattern is none of the known kinds.

    Args:
        bounds: `cu_seqlens` of the batch.
        batch_size: Rows.
        q_length: Tokens in a row.
        mask_function: (row, head, query, key) → whether the key is seen; as transformers passes it to a mask
            function.
        local_size: The window, or the chunk, that the model sets.
    """
    queries, keys = _pairs(bounds, batch_size * q_length, local_size or 1)
    # The mask function takes positions within a row.
    row = queries // q_length
    there = mask_function(row, torch.zeros_like(row), queries % q_length, keys % q_length)
    there = torch.as_tensor(there, device=row.device).expand_as(row).bool()
    ahead = keys - queries
    patterns: list[tuple[bool, int | None]] = [(True, None), (False, None)]
    if local_size is not None:
        # transformers counts the token itself in a causal window, but not in a bidirectional one.
        patterns = [(True, local_size), (False, local_size + 1)]
    for causal, window in patterns:
        seen = ahead <= 0 if causal else torch.ones_like(there)
        if window is not None:
            seen = seen & (ahead.abs() < window)
        if torch.equal(seen, there):
            return causal, window
    return None


def _pairs(bounds: Tensor, total: int, window: int) -> tuple[Tensor, Tensor]:
    """Queries spread over a batch; keys in their document: adjacent, around the window's ends, and anywhere."""
    numbered = torch.arange(min(total, _CHECKED_QUERIES), device=bounds.device)
    queries = numbered if total <= _CHECKED_QUERIES else numbered * 104_729 % total
    begins, ends = bounds[:-1].to(queries), bounds[1:].to(queries)
    document = torch.bucketize(queries, ends, right=True)
    begin, end = begins[document], ends[document]
    anywhere = begin + numbered * 7919 % (end - begin)
    offsets = (-window - 1, -window, -window + 1, 1, window, window + 1)
    near = [torch.minimum(torch.maximum(queries + offset, begin), end - 1) for offset in offsets]
    return queries.repeat(1 + len(near)), torch.cat([anywhere, *near])

"""Choose an attention kernel by shape, dtype and card, as torch's `scaled_dot_product_attention` does on CUDA.

Verified on an H200 with torch 2.11 by `tests/gpu/test_attention_choice.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IN_16_BITS = (torch.bfloat16, torch.float16)
_aten = torch.ops.aten
_MOST_FUSED_WIDTH = 256  # of flash attention, and of cuDNN's
_ALIGNED = 8  # elements to a multiple of which an additive mask, or a head's width, is padded


class AttentionChoice:
    """Stands in for `F.scaled_dot_product_attention` on fake tensors; called with the function itself first.

    cuDNN's kernel is first where torch prefers it, in 16 bits; else flash attention in 16 bits without a mask,
    otherwise memory-efficient attention if it applies; otherwise plain arithmetic, which stores all scores.

    Args:
        prefers_cudnn: torch tries cuDNN's kernel first, as on Hopper.
    """

    def __init__(self, *, prefers_cudnn: bool) -> None:
        self._prefers_cudnn = prefers_cudnn

    def __call__(
        self,
        plain: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """The output; what autograd saves of it is what CUDA's kernel saves."""
        if torch.is_autocast_enabled("cpu"):
            low = torch.get_autocast_dtype("cpu")
            query, key, value = (tensor.to(low) for tensor in (query, key, value))
            attn_mask = (
                attn_mask.to(low) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
            )
        widths = query.shape[-1], value.shape[-1]
        has_batch = query.dim() == 4
        in_16_bits = has_batch and query.dtype in IN_16_BITS and max(widths) <= _MOST_FUSED_WIDTH
        if in_16_bits and self._prefers_cudnn and not any(width % _ALIGNED for width in widths):
            mask = attn_mask if attn_mask is None else _as_added(attn_mask, query.dtype)
            return _aten._scaled_dot_product_cudnn_attention(
                query, key, value, mask, True, dropout_p, is_causal, False, scale=scale
            )[0]
        if in_16_bits and attn_mask is None and widths[0] == widths[1]:
            padded = [_padded(tensor) for tensor in (query, key, value)]
            scale = widths[0] ** -0.5 if scale is None else scale
            out = _aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)
            return out[0][..., : widths[0]]
        if has_batch and query.shape[-3] == key.shape[-3]:
            bias = None if attn_mask is None else _additive(attn_mask, query, key)
            needs_grad = any(tensor.requires_grad for tensor in (query, key, value))
            return _aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale
            )[0]
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        return _aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, **options
        )[0]


def _padded(tensor: Tensor) -> Tensor:
    missing = -tensor.shape[-1] % _ALIGNED
    return F.pad(tensor, (0, missing)) if missing else tensor


def _as_added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores, as large as the mask itself."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -torch.inf)


def _additive(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask in the kernel's form: floats, aligned rows, expanded over batch and heads."""
    mask = _as_added(mask, query.dtype)
    missing = -mask.shape[-1] % _ALIGNED
    if missing:
        mask = F.pad(mask, (0, missing))[..., : mask.shape[-1]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])

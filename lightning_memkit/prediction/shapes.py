"""Results of operators for which torch's fake kernels refuse inputs that the real ones accept."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The result of `torch.nn.functional.grouped_mm` in any dtype; torch's fake one takes only bfloat16."""
    dtype = out_dtype or a.dtype
    aligned = 16 // dtype.itemsize
    width = -(-b.shape[-1] // aligned) * aligned
    if a.dim() == b.dim():
        groups = a.shape[0] if a.dim() == 3 or offs is None else offs.shape[0]
        rows = a.shape[-2]
        return torch.empty_strided((groups, rows, b.shape[-1]), (rows * width, width, 1), dtype=dtype)
    return torch.empty_strided((a.shape[-2], b.shape[-1]), (width, 1), dtype=dtype)


SHAPES: dict[Any, Callable[..., Any]] = {torch.ops.aten._grouped_mm.default: grouped_mm}

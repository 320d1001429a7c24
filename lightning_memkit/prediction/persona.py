"""Make a step on the CPU's fake tensors run the operators that it would run on CUDA.

torch chooses by device: fused attention, dropout with a boolean mask, optimizers over lists of tensors, other
float32 operators under autocast. The memory that these choices save and allocate differs by up to a third, so
a prediction for a GPU on a machine without one must make them itself. Not yet verified on a GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.optim.optimizer as optimizers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from lightning_memkit.optim import blocks, kahan, modes, pieces, split, stochastic_rounding
from lightning_memkit.optim.fused import reference
from lightning_memkit.optim.stochastic_rounding import StochasticRounding
from lightning_memkit.prediction.replaced import replaced

_aten = torch.ops.aten
_IN_16_BITS = (torch.bfloat16, torch.float16)
_MOST_FLASH_WIDTH = 256
_ALIGNED = 8  # elements to a multiple of which an additive mask is padded

# Functions that autocast runs in float32 on CUDA and in 16 bits on the CPU.
_IN_FLOAT32 = {
    F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss,
    F.smooth_l1_loss, F.huber_loss, F.kl_div, F.cosine_similarity, F.normalize, F.softplus, F.poisson_nll_loss,
    torch.softmax, torch.log_softmax, torch.layer_norm, torch.group_norm, torch.exp, torch.expm1, torch.log,
    torch.log10, torch.log1p, torch.log2, torch.pow, torch.reciprocal, torch.rsqrt, torch.sinh, torch.cosh, torch.tan,
    torch.acos, torch.asin, torch.norm, torch.dist, torch.cdist, torch.logsumexp, Tensor.softmax, Tensor.log_softmax,
    Tensor.exp, Tensor.log, Tensor.pow, Tensor.__pow__, Tensor.rsqrt, Tensor.reciprocal, Tensor.norm, Tensor.logsumexp,
}  # fmt: skip
# Functions that read 16 bits and return float32, without a copy in between.
_TO_FLOAT32 = {
    torch.sum, torch.prod, torch.cumsum, torch.cumprod, Tensor.sum, Tensor.prod, Tensor.cumsum, Tensor.cumprod,
}  # fmt: skip


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Within the context, operators choose by device as on CUDA; for use in a fork or copy."""
    choices = _Choices()
    with _in_backward_too(choices), choices:
        yield


@contextmanager
def steps_as_on_cuda() -> Iterator[None]:
    """Within the context, optimizers choose by device as on CUDA; for use in a fork or copy."""
    with _lists_by_default(), _in_large_pieces(), _whole_tensors():
        yield


class _Choices(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        chosen = _CHOSEN.get(func)
        if chosen is not None:
            return chosen(func, *args, **kwargs)
        if func in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, _float32, (tuple(args), kwargs))
        elif func in _TO_FLOAT32 and torch.is_autocast_enabled("cpu") and args[0].dtype in _IN_16_BITS:
            kwargs = {"dtype": torch.float32, **kwargs}
        return func(*args, **kwargs)


@contextmanager
def _in_backward_too(choices: TorchFunctionMode) -> Iterator[None]:
    """Make the same choices when blocks are recomputed: torch leaves the mode before a backward."""
    autograd: Any = torch.autograd
    plain = autograd._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        with choices:
            return plain(*args, **kwargs)

    autograd._engine_run_backward = run
    try:
        yield
    finally:
        autograd._engine_run_backward = plain


def _float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _IN_16_BITS else tensor


def _dropout(
    plain: Callable[..., Tensor], input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """The fused kernel, which saves a boolean for each element instead of a factor."""
    if not training or inplace or not 0 < p < 1:
        return plain(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _attention(
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
    """Flash attention in 16 bits without a mask; otherwise memory-efficient attention if it applies."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
    options = {"scale": scale}
    fused = query.dim() == 4 and value.shape[-1] == query.shape[-1]
    if fused and attn_mask is None and query.dtype in _IN_16_BITS and query.shape[-1] <= _MOST_FLASH_WIDTH:
        padded = [_padded(tensor) for tensor in (query, key, value)]
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        out = _aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., : query.shape[-1]]
    heads = query.shape[-3] // key.shape[-3] if fused else 1
    if fused and heads == 1:
        bias = None if attn_mask is None else _additive(attn_mask, query, key)
        needs_grad = any(tensor.requires_grad for tensor in (query, key, value))
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs_grad, dropout_p, is_causal, **options
        )[0]
    return _aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa, **options
    )[0]


def _padded(tensor: Tensor) -> Tensor:
    missing = -tensor.shape[-1] % _ALIGNED
    return F.pad(tensor, (0, missing)) if missing else tensor


def _additive(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask in the kernel's form: floats, aligned rows, expanded over batch and heads."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)
    missing = -mask.shape[-1] % _ALIGNED
    if missing:
        mask = F.pad(mask, (0, missing))[..., : mask.shape[-1]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


_CHOSEN: dict[Any, Callable[..., Any]] = {F.dropout: _dropout, F.scaled_dot_product_attention: _attention}


@contextmanager
def _lists_by_default() -> Iterator[None]:
    """Make optimizers step lists of tensors at once (foreach) by default."""
    devices = optimizers._get_foreach_kernels_supported_devices
    known = optimizers._foreach_supported_types
    optimizers._get_foreach_kernels_supported_devices = lambda: [*devices(), "cpu"]
    known.append(FakeTensor)
    try:
        yield
    finally:
        optimizers._get_foreach_kernels_supported_devices = devices
        known.remove(FakeTensor)


@contextmanager
def _in_large_pieces() -> Iterator[None]:
    """Make compensated steps take slices as large as on an accelerator, in newly allocated memory for each bucket."""
    before = pieces.PIECE_ELEMENTS_CPU, reference.PIECE_ELEMENTS_CPU
    pieces.PIECE_ELEMENTS_CPU = pieces.PIECE_ELEMENTS_ACCELERATOR
    reference.PIECE_ELEMENTS_CPU = reference.PIECE_ELEMENTS_ACCELERATOR
    try:
        with replaced(pieces.Scratch, begin_bucket=lambda scratch, bucket: None):
            yield
    finally:
        pieces.PIECE_ELEMENTS_CPU, reference.PIECE_ELEMENTS_CPU = before


@contextmanager
def _whole_tensors() -> Iterator[None]:
    """Join and split float32 shadows as whole tensors by torch's operators: memkit's kernels need a CPU."""
    plain: Any = StochasticRounding.round_

    def walk(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        yield blocks.flat_views(*tensors) or tuple(tensor.detach() for tensor in tensors)

    def round_(rounding: StochasticRounding, source: Tensor, out: Tensor, stream: Any) -> None:
        flat = blocks.flat_views(source, out)
        if flat is None:
            plain(rounding, source, out, stream)  # it calls this again with dense tensors
            return
        noise = torch.empty(source.numel(), dtype=torch.int32).random_(0, 1 << 16)
        stochastic_rounding._round(flat[0], flat[1], noise)

    with ExitStack() as stack:
        for owner in (kahan, split, stochastic_rounding):
            stack.enter_context(replaced(owner, blocks=walk, surely_finite=lambda tensor: False))
        stack.enter_context(replaced(modes, _for_kernel=lambda *tensors: None))
        stack.enter_context(replaced(StochasticRounding, round_=round_))
        yield

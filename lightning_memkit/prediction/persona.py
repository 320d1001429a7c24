"""Make a step on the CPU's fake tensors run the operators that it would run on CUDA.

torch chooses by device: fused attention, dropout with a boolean mask, optimizers over lists of tensors, other
float32 operators under autocast. The memory that these choices save and allocate differs by up to a third, so
a prediction for a GPU on a machine without one must make them itself.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any

import torch
import torch.optim.optimizer as optimizers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from lightning_memkit.optim import blocks, kahan, modes, pieces, split, split24, stochastic_rounding
from lightning_memkit.optim.fused import reference
from lightning_memkit.prediction.persona_attention import IN_16_BITS, AttentionChoice
from lightning_memkit.prediction.replaced import replaced

# Functions that autocast runs in float32 on CUDA and in 16 bits on the CPU.
_IN_FLOAT32 = {
    F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss,
    F.smooth_l1_loss, F.huber_loss, F.kl_div, F.cosine_similarity, F.normalize, F.softplus, F.poisson_nll_loss,
    torch.softmax, torch.log_softmax, torch.layer_norm, torch.group_norm, torch.exp, torch.expm1, torch.log,
    torch.log10, torch.log1p, torch.log2, torch.pow, torch.reciprocal, torch.rsqrt, torch.sinh, torch.cosh, torch.tan,
    torch.acos, torch.asin, torch.norm, torch.dist, torch.cdist, torch.logsumexp, Tensor.softmax, Tensor.log_softmax,
    Tensor.exp, Tensor.log, Tensor.pow, Tensor.__pow__, Tensor.rsqrt, Tensor.reciprocal, Tensor.norm, Tensor.logsumexp,
    torch.erfinv, torch.pdist, torch.renorm, torch.linalg.vector_norm, torch.linalg.matrix_norm, F.pdist,
    F.pairwise_distance, F.interpolate, F.upsample, Tensor.expm1, Tensor.log10, Tensor.log1p, Tensor.log2, Tensor.sinh,
    Tensor.cosh, Tensor.tan, Tensor.acos, Tensor.asin, Tensor.erfinv, Tensor.dist, Tensor.renorm,
}  # fmt: skip
# Functions that read 16 bits and return float32, without a copy in between.
_TO_FLOAT32 = {
    torch.sum, torch.prod, torch.cumsum, torch.cumprod, Tensor.sum, Tensor.prod, Tensor.cumsum, Tensor.cumprod,
}  # fmt: skip
# Functions that autocast runs in float32 on the CPU, and as they are given on CUDA.
_AS_GIVEN = {
    F.pad, F.avg_pool3d, F.adaptive_avg_pool3d, F.max_pool3d, F.adaptive_max_pool3d, torch.quantile, torch.nanquantile,
    Tensor.quantile, Tensor.nanquantile,
}  # fmt: skip


@contextmanager
def as_on_cuda(*, prefers_cudnn: bool = False) -> Iterator[None]:
    """Within the context, operators choose by device as on CUDA; for use in a fork or copy.

    Args:
        prefers_cudnn: attention is cuDNN's first; see `Device.prefers_cudnn`.
    """
    choices = _Choices(AttentionChoice(prefers_cudnn=prefers_cudnn))
    within = {name: choices.instead_of(getattr(F, name)) for name in _CALLED_WITHIN}
    with replaced(F, **within), _in_backward_too(choices), choices:
        yield


@contextmanager
def steps_as_on_cuda() -> Iterator[None]:
    """Within the context, optimizers choose by device as on CUDA; for use in a fork or copy."""
    with _lists_by_default(), _in_large_pieces(), _whole_tensors():
        yield


class _Choices(TorchFunctionMode):
    def __init__(self, attention: AttentionChoice) -> None:
        super().__init__()
        self._chosen = {**_CHOSEN, F.scaled_dot_product_attention: attention}

    def instead_of(self, func: Any) -> Callable[..., Any]:
        """A function that makes the choice though no mode sees it; it stands where torch's own stood."""

        @wraps(func)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            return self.__torch_function__(func, (), args, kwargs)

        return chosen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        chosen = self._chosen.get(func)
        if chosen is not None:
            return chosen(func, *args, **kwargs)
        if func in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, _float32, (tuple(args), kwargs))
        elif func in _TO_FLOAT32 and torch.is_autocast_enabled("cpu") and args[0].dtype in IN_16_BITS:
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
    return tensor.float() if tensor.dtype in IN_16_BITS else tensor


def _dropout(
    plain: Callable[..., Tensor], input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """The fused kernel, which saves a boolean for each element instead of a factor."""
    if not training or inplace or not 0 < p < 1:
        return plain(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _c_dropout(plain: Callable[..., Tensor], input: Tensor, p: float, train: bool) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if train and 0 < p < 1 else plain(input, p, train)


def _rms_norm(
    plain: Callable[..., Tensor],
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """One kernel, which saves its input and a factor a row, where weight and input have one dtype."""
    if _autocasts_rms_norm() and torch.is_autocast_enabled("cpu"):
        input, weight = _float32(input), None if weight is None else _float32(weight)
    if weight is not None and weight.dtype != input.dtype:
        return plain(input, normalized_shape, weight, eps)
    with torch.autocast("cpu", enabled=False):  # of the same sizes, but for a mean a row
        return torch.layer_norm(input, normalized_shape, weight, None, 1e-5 if eps is None else eps)


@cache
def _autocasts_rms_norm() -> bool:
    """Whether autocast on CUDA runs it in float32: torch 2.13 does, 2.11 does not."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")


def _log_sigmoid(plain: Callable[..., Tensor], input: Tensor) -> Tensor:
    """An operator of the same sizes: it saves its input alone, as CUDA's does. The CPU's saves a buffer as well."""
    return F.silu(input)


def _einsum(plain: Callable[..., Tensor], equation: str, *operands: Any) -> Tensor:
    """Casts its operands as they are, each once; on the CPU its products cast views of them."""
    if torch.is_autocast_enabled("cpu"):
        operands = (
            tuple(operands[0]) if len(operands) == 1 and not isinstance(operands[0], Tensor) else operands
        )
        low = torch.get_autocast_dtype("cpu")
        cast = {id(x): x.to(low) if x.dtype is torch.float32 else x for x in operands}
        operands = tuple(cast[id(x)] for x in operands)
    return plain(equation, *operands)


def _as_given(plain: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return plain(*args, **kwargs)


_CHOSEN: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: _c_dropout,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.logsigmoid: _log_sigmoid,
    torch.einsum: _einsum,
    **dict.fromkeys(_AS_GIVEN, _as_given),
}
# Functions of torch that call these by their names in `torch.nn.functional`: a mode does not see what runs within a
# function that it was asked for.
_CALLED_WITHIN = ("scaled_dot_product_attention", "dropout", "logsigmoid", "softmax", "log_softmax")


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

    def walk(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        yield blocks.flat_views(*tensors) or tuple(tensor.detach() for tensor in tensors)

    with ExitStack() as stack:
        for owner in (kahan, split, split24, stochastic_rounding):
            stack.enter_context(replaced(owner, blocks=walk, surely_finite=lambda tensor: False))
        stack.enter_context(replaced(modes, _for_kernel=lambda *tensors: None))
        stack.enter_context(replaced(stochastic_rounding, draws_itself=lambda tensor: True))
        yield

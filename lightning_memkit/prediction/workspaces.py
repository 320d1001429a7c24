"""Workspaces that kernels allocate within one operator, hidden from the dispatcher; measured once a shape."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_memkit.memory.allocator_trace import AllocatorTrace
from lightning_memkit.memory.meter import tensors_in, unmetered

_aten = torch.ops.aten
# On CPU: oneDNN reorders operands and expands a grouped convolution's weights; norms keep sums for each
# thread.
_WITH_WORKSPACE = {
    _aten.convolution,
    _aten.convolution_backward,
    _aten.native_layer_norm,
    _aten.native_layer_norm_backward,
    _aten.native_batch_norm_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
    _aten.gelu_backward,
    _aten.bernoulli_,
    _aten._grouped_mm,
}
_WITH_WORKSPACE_IN_16_BITS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm}
# On CUDA: operators that cuBLAS computes.
MATRIX_PRODUCTS = {
    *_WITH_WORKSPACE_IN_16_BITS, _aten.mv, _aten.addmv, _aten.dot, _aten.vdot, _aten.addbmm,
    _aten._addmm_activation, _aten._int_mm, _aten._scaled_mm,
}  # fmt: skip
_TORCHS = ("aten", "prim", "prims", "c10d", "_c10d_functional", "profiler")  # others are not torch's
# The most bytes of operands in a measurement; larger ones are extrapolated from fewer rows.
_MOST_BYTES = 1 << 26


class Workspaces:
    """Measures what operators need besides their results, on this machine's CPU; some milliseconds a shape.

    An operator runs once on tensors of the given shapes. For a large batch it runs on one and on two samples,
    and the result is extrapolated linearly. Only its operands are allocated, at most 64 MiB at a time. If
    even those are larger (a large matrix of 16-bit weights), it is not measured, and counts as 0.
    """

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def of(self, func: Any, args: Any, kwargs: dict[str, Any]) -> int:
        """Bytes at the operator's own peak that are neither operand nor result."""
        if func.namespace in _TORCHS and not _may_need_one(func, args):
            return 0
        key = (func, _signature(args), _signature(kwargs))
        if key not in self._known:
            # Custom operators may compile inside: allow that here, as in a run, although a meter forbids it.
            with unmetered(), torch.no_grad(), torch.compiler.set_stance("default"):
                self._known[key] = _measured(func, args, kwargs)
        return self._known[key]


def _may_need_one(func: Any, args: Any) -> bool:
    if func.overloadpacket in _WITH_WORKSPACE:
        return True
    return func.overloadpacket in _WITH_WORKSPACE_IN_16_BITS and args[0].dtype.itemsize == 2


def _signature(item: Any) -> Any:
    if isinstance(item, Tensor):
        return (tuple(item.shape), tuple(item.stride()), item.dtype)
    if isinstance(item, (list, tuple)):
        return tuple(_signature(value) for value in item)
    return (
        tuple((name, _signature(value)) for name, value in item.items()) if isinstance(item, dict) else item
    )


def _measured(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    given = list(tensors_in([*args, *kwargs.values()]))
    if not given or not AllocatorTrace.available():  # torch can't run a second profiler
        return 0
    rows = given[0].shape[0] if given[0].dim() else 1
    size = _operand_bytes(given, rows, rows)
    if size <= _MOST_BYTES:
        return _run(func, args, kwargs, rows, rows)
    if func.namespace not in _TORCHS:  # such as an optimizer's: proportional to rows
        few = max(1, rows * _MOST_BYTES // size)
        fits = _operand_bytes(given, rows, few) <= _MOST_BYTES
        return _run(func, args, kwargs, rows, few) * rows // few if fits else 0
    if _operand_bytes(given, rows, 2) > _MOST_BYTES:
        return 0
    one, two = (_run(func, args, kwargs, rows, few) for few in (1, 2))
    return one + (two - one) * (rows - 1)


def _operand_bytes(given: list[Tensor], rows: int, few: int) -> int:
    """The bytes that `_run` allocates for these operands."""
    return sum(
        _spanned(_with_rows(tensor, rows, few), tensor.stride()) * tensor.dtype.itemsize for tensor in given
    )


def _with_rows(fake: Tensor, rows: int, few: int) -> list[int]:
    shape = list(fake.shape)
    if shape and shape[0] == rows:
        shape[0] = few
    return shape


def _spanned(shape: list[int], stride: tuple[int, ...]) -> int:
    """The number of elements from a tensor's first to its last in memory."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _run(func: Any, args: Any, kwargs: dict[str, Any], rows: int, few: int) -> int:
    """The operator's workspace when only `few` of the first operand's `rows` exist."""
    given = list(tensors_in([*args, *kwargs.values()]))
    has_float32 = any(tensor.dtype is torch.float32 for tensor in given)

    def real(fake: Tensor) -> Tensor:
        dtype = fake.dtype
        if has_float32 and "norm" in func.__name__ and fake.shape != given[0].shape:
            dtype = torch.float32  # statistics, to which fake kernels give the input's dtype
        return torch.empty_strided(_with_rows(fake, rows, few), fake.stride(), dtype=dtype).zero_()

    real_args, real_kwargs = tree_map_only(Tensor, real, (tuple(args), kwargs))
    if func.namespace not in _TORCHS:
        func(*real_args, **real_kwargs)  # a first call, since what it caches for good is no workspace
    with AllocatorTrace() as trace:
        out = func(*real_args, **real_kwargs)
    kept = sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(out))
    return max(0, trace.peak_bytes - kept)

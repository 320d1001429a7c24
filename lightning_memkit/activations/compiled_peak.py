"""Measures whether a budget of torch's partitioner lowers the peak; the budget bounds only saved bytes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_memkit.memory.allocator_trace import AllocatorTrace
from lightning_memkit.memory.meter import tensors_in

Compiled = Callable[..., Any]

NO_BOUND = 1.0
_SEARCHED = (0.25, 0.5, 0.75)
_LEAST_GAIN = 0.02


@dataclass(frozen=True, kw_only=True)
class BlockBytes:
    """The bytes that one block's forward leaves alive (with its output), and the peak of its forward and backward."""

    saved_bytes: int
    peak_bytes: int

    def peak_of(self, blocks: int) -> int:
        """The peak of a sequence of such blocks: all save, and one at a time runs its backward."""
        return blocks * self.saved_bytes + self.peak_bytes - self.saved_bytes


@dataclass(frozen=True, kw_only=True)
class PeakVerdict:
    """The budget to use, and the blocks' predicted peaks in bytes by budget (infinite: out of memory)."""

    asked: float
    used: float
    peaks: dict[float, float]

    @property
    def helps(self) -> bool:
        """Whether the budget that is used lowers the peak."""
        return _lowers(self.peaks[self.used], self.peaks[NO_BOUND])


def choose_budget(asked: float, peak_of: Callable[[float], float | None]) -> PeakVerdict | None:
    """The asked budget if it lowers the peak by 2 %; otherwise the best of a few larger ones, or none.

    Args:
        asked: the budget that the user wrote.
        peak_of: measures a budget; called for as few budgets as needed. It returns None if there is no
            backward.
    """
    peaks: dict[float, float] = {}

    def add(budget: float) -> bool:
        peak = peak_of(budget)
        if peak is not None:
            peaks[budget] = peak
        return peak is not None

    if not add(asked) or not add(NO_BOUND):
        return None
    if _lowers(peaks[asked], peaks[NO_BOUND]):
        return PeakVerdict(asked=asked, used=asked, peaks=peaks)
    for budget in _SEARCHED:
        if budget > asked:
            add(budget)
    used = min(peaks, key=lambda budget: peaks[budget])
    if not _lowers(peaks[used], peaks[NO_BOUND]):
        used = asked if peaks[asked] <= peaks[NO_BOUND] else NO_BOUND
    return PeakVerdict(asked=asked, used=used, peaks=peaks)


def peak_of_row(compiled: Compiled, inputs: Sequence[Any], blocks: int) -> float | None:
    """The predicted peak of a sequence of blocks, infinite if one block does not fit; None without a backward."""
    try:
        found = measure_block(compiled, inputs)
    except torch.OutOfMemoryError:
        return math.inf
    return None if found is None else found.peak_of(blocks)


def _lowers(peak_bytes: float, without_bytes: float) -> bool:
    return peak_bytes <= (1 - _LEAST_GAIN) * without_bytes


# --- one block -----------------------------------------------------------------------------------------------------


def can_measure(inputs: Sequence[Any]) -> bool:
    """Whether a run on copies is meaningful: a gradient is wanted, and no mode observes the operators."""
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    return (
        torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in tensors)
        and not any(_is_special(tensor) for tensor in tensors)
        and AllocatorTrace.available()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def measure_block(compiled: Compiled, inputs: Sequence[Any]) -> BlockBytes | None:
    """Run a compiled graph forward and backward on copies of its inputs; None if it has no backward.

    It runs twice, because the first run may compile. Inputs, weights, gradients and buffers are unchanged,
    and hooks on them don't run; random numbers are drawn. Memory: the copies, which include the weights and
    buffers of one block.
    """
    device = next(value.device for value in inputs if isinstance(value, Tensor) and value.requires_grad)
    if not _forward_and_backward(compiled, _copies(inputs), lambda: None):
        return None
    copies = _copies(inputs)
    with AllocatorTrace(device) as trace:
        _forward_and_backward(compiled, copies, trace.mark)
    return BlockBytes(saved_bytes=trace.marked_bytes[0], peak_bytes=trace.peak_bytes)


def _forward_and_backward(compiled: Compiled, inputs: Sequence[Any], between: Callable[[], None]) -> bool:
    found = compiled(*inputs)
    outputs = [value for value in tensors_in(found) if value.requires_grad]
    between()
    if not outputs:
        return False
    wanted = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    torch.autograd.grad(outputs, wanted, [torch.ones_like(value) for value in outputs], allow_unused=True)
    return True


def _copies(inputs: Sequence[Any]) -> list[Any]:
    """Inputs with the same sizes, strides and aliases, detached from the graph that they come from."""
    storages: dict[int, torch.UntypedStorage] = {}
    copied: dict[int, Tensor] = {}
    return [_copy(value, storages, copied) if isinstance(value, Tensor) else value for value in inputs]


def _copy(tensor: Tensor, storages: dict[int, torch.UntypedStorage], copied: dict[int, Tensor]) -> Tensor:
    if id(tensor) not in copied:
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone()
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copy.set_(storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
        copied[id(tensor)] = copy.requires_grad_(tensor.requires_grad) if tensor.is_leaf else _made(copy)
    return copied[id(tensor)]


def _made(tensor: Tensor) -> Tensor:
    """The tensor as the result of an operator: unlike a leaf, it may be written in place, as inputs may."""
    return _Made.apply(tensor, torch.empty((), device=tensor.device, requires_grad=True))  # pyright: ignore


class _Made(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root: Tensor) -> Tensor:  # noqa: D102
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: D102
        return None, None


def _is_special(tensor: Tensor) -> bool:
    """Whether a tensor wraps others (DTensor, quantized, fake), or is not strided memory."""
    own_dispatch = getattr(type(tensor), "__torch_dispatch__", None)
    return tensor.layout is not torch.strided or own_dispatch is not torch._C._disabled_torch_dispatch_impl

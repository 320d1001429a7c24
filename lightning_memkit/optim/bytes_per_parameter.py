"""Measures the bytes of an optimizer's weights, gradients and states from the tensors that are alive now."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_memkit.optim.blocks import local_part
from lightning_memkit.optim.modes import LOW_STATES
from lightning_memkit.optim.pieces import slots


@dataclass(frozen=True, kw_only=True)
class BytesPerParameter:
    """Bytes of the tensors that are alive now, divided by the number of parameters.

    Args:
        weights: the parameters themselves.
        gradients: their gradients; 0 after `zero_grad`.
        states: the optimizer's states, without the compensation.
        compensation: low halves or Kahan's compensation.
        parameters: the number of values in the parameters.
        quantized: these figures for the parameters with 8-bit states; None if there are none.
        exceptions: these figures for the parameters without, where others have 8-bit states: embeddings and
            small tensors; None if there are none.
    """

    weights: float
    gradients: float
    states: float
    compensation: float
    parameters: int = 0
    quantized: "BytesPerParameter | None" = None
    exceptions: "BytesPerParameter | None" = None

    @property
    def total(self) -> float:
        """The sum of weights, gradients, states and compensation."""
        return self.weights + self.gradients + self.states + self.compensation

    @property
    def exceptions_share(self) -> float:
        """The fraction of the parameters, from 0 to 1, that have no 8-bit states although others have."""
        return 0.0 if self.exceptions is None else self.exceptions.parameters / max(self.parameters, 1)

    def __str__(self) -> str:
        parts = (
            f"{self.total:.2f} bytes a parameter (weights {self.weights:.2f}, gradients {self.gradients:.2f}, "
            f"states {self.states:.2f}, compensation {self.compensation:.2f})"
        )
        if self.quantized is None:
            return parts
        if self.exceptions is None:
            return f"{parts}, all with 8-bit states"
        return (
            f"{parts}: {self.quantized.total:.2f} for the {1 - self.exceptions_share:.1%} with 8-bit states, "
            f"{self.exceptions.total:.2f} for the other {self.exceptions_share:.1%}"
        )


@dataclass
class _Tally:
    """Bytes by kind, and how many parameters they belong to."""

    parameters: int = 0
    weights: int = 0
    gradients: int = 0
    states: int = 0
    compensation: int = 0

    def add(self, other: "_Tally") -> None:
        for kind in vars(self):
            setattr(self, kind, getattr(self, kind) + getattr(other, kind))

    def per_parameter(self) -> BytesPerParameter:
        count = max(self.parameters, 1)
        return BytesPerParameter(
            weights=self.weights / count,
            gradients=self.gradients / count,
            states=self.states / count,
            compensation=self.compensation / count,
            parameters=self.parameters,
        )


def bytes_per_parameter(optimizer: Optimizer) -> BytesPerParameter:
    """Measure any optimizer; most states exist only after the first step. A tensor shared by states counts once."""
    whole, quantized, exceptions = _Tally(), _Tally(), _Tally()
    shared: set[int] = set()
    for slot in slots(optimizer):
        parameter = slot.parameter
        state = optimizer.state[parameter] if parameter in optimizer.state else {}
        one = _Tally(
            parameters=local_part(parameter).numel(),
            weights=_bytes(parameter),
            gradients=_bytes(parameter.grad),
            states=sum(_bytes(value, shared) for name, value in state.items() if name not in LOW_STATES),
            compensation=sum(_bytes(value) for name, value in state.items() if name in LOW_STATES),
        )
        moments = [value for name, value in state.items() if name not in LOW_STATES]
        (quantized if any(map(_is_quantized, moments)) else exceptions).add(one)
        whole.add(one)
    if quantized.parameters == 0:
        return whole.per_parameter()
    return replace(
        whole.per_parameter(),
        quantized=quantized.per_parameter(),
        exceptions=exceptions.per_parameter() if exceptions.parameters else None,
    )


def _stored(value: Any) -> Iterator[Tensor]:
    """The plain tensors that make up a state: the shard of a DTensor, the inner tensors of a quantized one."""
    if not isinstance(value, Tensor):
        return
    to_local = getattr(value, "to_local", None)
    local = value if to_local is None else to_local()
    if hasattr(local, "__tensor_flatten__"):
        names, _ = local.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        for name in names:
            yield from _stored(getattr(local, name))
    else:
        yield local


def _is_quantized(value: Any) -> bool:
    return any(tensor.dtype in (torch.uint8, torch.int8) for tensor in _stored(value))


def _bytes(value: Any, shared: set[int] | None = None) -> int:
    """Bytes of a value's tensors; those already in ``shared`` (such as code tables) are not counted again."""
    total = 0
    for tensor in _stored(value):
        if shared is not None and tensor.data_ptr() != 0:
            if tensor.data_ptr() in shared:
                continue
            shared.add(tensor.data_ptr())
        total += tensor.numel() * tensor.element_size()
    return total

"""What an optimizer's weights, gradients and states take in memory, measured from the tensors alive now."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_memkit.optim.blocks import local_part
from lightning_memkit.optim.pieces import slots
from lightning_memkit.optim.shadow import LOW_STATES


@dataclass(frozen=True, kw_only=True)
class BytesPerParameter:
    """Bytes that the tensors alive now take, divided by the number of parameters.

    Args:
        weights: the parameters themselves.
        gradients: their gradients; 0 after `zero_grad`.
        states: what the optimizer keeps, without the compensation.
        compensation: low halves or Kahan's compensation.
    """

    weights: float
    gradients: float
    states: float
    compensation: float

    @property
    def total(self) -> float:
        """The sum of all four."""
        return self.weights + self.gradients + self.states + self.compensation


def bytes_per_parameter(optimizer: Optimizer) -> BytesPerParameter:
    """Measure any optimizer; most states exist from the first step on."""
    count = weights = gradients = states = compensation = 0
    for slot in slots(optimizer):
        parameter = slot.parameter
        count += local_part(parameter).numel()
        weights += _bytes(parameter)
        gradients += _bytes(parameter.grad)
        state = optimizer.state[parameter] if parameter in optimizer.state else {}
        for name, value in state.items():
            if name in LOW_STATES:
                compensation += _bytes(value)
            else:
                states += _bytes(value)
    count = max(count, 1)
    return BytesPerParameter(
        weights=weights / count,
        gradients=gradients / count,
        states=states / count,
        compensation=compensation / count,
    )


def _bytes(value: Any) -> int:
    if not isinstance(value, Tensor):
        return 0
    local = local_part(value)
    return local.numel() * local.element_size()

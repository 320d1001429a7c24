"""The options that every part of a step on float32 shadows shares."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_memkit.optim.modes import Mode, States
from lightning_memkit.optim.pieces import Slot, is_compensated
from lightning_memkit.optim.stochastic_rounding import StochasticRounding


class ShadowOptions:
    """How an optimizer's bfloat16 parameters are stepped in float32; `ShadowEngine` does the step.

    Args:
        mode: the compensation, which stores the bits that bfloat16 lacks; None steps every parameter as it
            is.
        states: ``"compact"`` keeps moments in bfloat16, ``"exact"`` in float32.
        rounding: the noise of stochastic rounding.
        bucket_bytes: bytes of float32 temporaries at a time; None for a size that suits the device.
    """

    def __init__(
        self, mode: Mode | None, states: States, rounding: StochasticRounding, bucket_bytes: int | None
    ) -> None:
        self.mode: Mode | None = mode
        self.states: States = states
        self.rounding = rounding
        self.bucket_bytes = bucket_bytes
        self.under_identity = False  # whether parameters become float32 themselves, without shadows
        self.bfloat16_states: set[str] = set()  # states that the optimizer itself chose to keep in bfloat16
        self.refuses_own_ways = False  # whether a step may evaluate its closure only once, at its start
        self.may_fuse = True  # whether a kernel may replace the step of a class that it knows
        # A placeholder for parameters that are not in the bucket: without a gradient the optimizer skips it,
        # and the places of the others, which some optimizers use as keys, stay the same.
        self._absent = Parameter(torch.empty(0))

    def shadows(self, parameter: Tensor) -> bool:
        """Whether a parameter is stepped on a float32 shadow."""
        return self.mode is not None and is_compensated(parameter)

    def shadowed(self, ready: Sequence[Slot]) -> list[Slot]:
        """Those that are stepped on float32 shadows."""
        dtype = torch.bfloat16  # as `is_compensated` says, without a call for each
        return [] if self.mode is None else [slot for slot in ready if slot.parameter.dtype is dtype]

    def absent(self, count: int) -> list[Parameter]:
        """Placeholders for the parameters of a group."""
        return [self._absent] * count

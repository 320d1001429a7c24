"""The step of any optimizer on float32 shadows of bfloat16 weights, bucket by bucket.

The user's optimizer, its parameters and its group dicts stay what they are. For each bucket the engine builds
float32 shadow parameters, shows the optimizer nothing but them, calls its own step, and writes weights and
states back. The update, weight decay included, therefore happens in float32 on the compensated value.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.optim.closures import with_closure
from lightning_memkit.optim.methods import uses_closure_its_own_way
from lightning_memkit.optim.modes import Mode, States
from lightning_memkit.optim.open_step import OpenStep
from lightning_memkit.optim.pieces import is_compensated, slots
from lightning_memkit.optim.stochastic_rounding import StochasticRounding


class ShadowEngine:
    """Steps an optimizer's bfloat16 parameters in float32.

    Args:
        mode: what keeps the bits that bfloat16 lacks; None steps every parameter as it is.
        states: ``"compact"`` keeps moments in bfloat16, ``"exact"`` in float32.
        rounding: the noise of stochastic rounding.
        bucket_bytes: float32 temporaries at a time; None for a size that suits the device.
    """

    def __init__(
        self, mode: Mode | None, states: States, rounding: StochasticRounding, bucket_bytes: int | None
    ) -> None:
        self.mode: Mode | None = mode
        self.states: States = states
        self.rounding = rounding
        self.bucket_bytes = bucket_bytes
        self.under_identity = False  # whether parameters are float32 themselves in a step, not by shadows
        self.bfloat16_states: set[str] = set()  # states that an optimizer keeps in bfloat16 by its own choice
        self.refuses_own_ways = False  # whether a step may evaluate its closure at its start only
        self.may_fuse = True  # whether a kernel may stand in for the step of a class that it knows
        # What the optimizer sees in the place of parameters that are not in the bucket: it has no gradient,
        # so it is passed over, and the places of the others, which some optimizers go by, stay.
        self._absent = Parameter(torch.empty(0))

    @classmethod
    def plain(cls) -> "ShadowEngine":
        """An engine that steps every parameter as it is: the order of a step can be chosen, nothing else."""
        return cls(None, "exact", StochasticRounding(), None)

    def shadows(self, parameter: Tensor) -> bool:
        """Whether a parameter is stepped on a float32 shadow."""
        return self.mode is not None and is_compensated(parameter)

    def step(
        self,
        optimizer: Optimizer,
        stock_step: Callable[..., Any],
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """One optimizer step, from the gradients as they stand, or as the closure gives them within the step.

        Args:
            optimizer: whose parameters are stepped.
            stock_step: its own step.
            closure: what that is to evaluate.

        Returns:
            What the stock step returns, where it evaluates the model itself.
        """
        own_way = closure is not None and uses_closure_its_own_way(optimizer)
        if own_way and self.under_identity:
            with torch.no_grad():
                step = self.begin(optimizer, stock_step)
            result = step.evaluate(closure)
            with torch.no_grad():
                step.finish()
            return result
        step = self.begin(optimizer, with_closure(stock_step, closure))
        ready = [slot for slot in slots(optimizer) if slot.parameter.grad is not None]
        step.advance(ready, everything=True)
        step.finish()
        return None

    def begin(self, optimizer: Optimizer, stock_step: Callable[..., Any]) -> OpenStep:
        """Open a step that is advanced parameter by parameter; its result is that of one whole step."""
        return OpenStep(self, optimizer, stock_step)

    def absent(self, count: int) -> list[Parameter]:
        """Placeholders for the parameters of a group."""
        return [self._absent] * count

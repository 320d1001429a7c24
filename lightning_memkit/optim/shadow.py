"""Steps any optimizer on float32 shadows of bfloat16 weights, bucket by bucket.

The user's optimizer, its parameters and its group dicts stay the same objects. For each bucket the engine
builds float32 shadow parameters, puts only these into the optimizer's groups, calls the optimizer's own step,
and writes weights and states back. The update, weight decay included, therefore happens in float32 on the
compensated value.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_memkit.optim.closures import with_closure
from lightning_memkit.optim.methods import uses_closure_its_own_way
from lightning_memkit.optim.open_step import OpenStep
from lightning_memkit.optim.pieces import slots_of_step, with_gradients
from lightning_memkit.optim.shadow_options import ShadowOptions
from lightning_memkit.optim.stochastic_rounding import StochasticRounding


class ShadowEngine(ShadowOptions):
    """Steps an optimizer's bfloat16 parameters in float32, according to its options."""

    @classmethod
    def plain(cls) -> "ShadowEngine":
        """An engine that steps every parameter as it is, so that only the order of a step can be chosen."""
        return cls(None, "exact", StochasticRounding(), None)

    def step(
        self,
        optimizer: Optimizer,
        stock_step: Callable[..., Any],
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Take one optimizer step, with the existing gradients or those that the closure computes within the step.

        Args:
            optimizer: the optimizer of the parameters.
            stock_step: its own step.
            closure: the closure that this step evaluates.

        Returns:
            The result of the stock step, if it evaluates the model itself.
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
        step.advance(with_gradients(slots_of_step(optimizer)), everything=True)
        step.finish()
        return None

    def begin(self, optimizer: Optimizer, stock_step: Callable[..., Any]) -> OpenStep:
        """Open a step that is advanced parameter by parameter; its result is that of one whole step."""
        return OpenStep(self, optimizer, stock_step)

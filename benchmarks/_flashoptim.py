"""FlashOptim's AdamW and SGD in plain torch, from their paper alone, as a peer on machines without CUDA.

Gonzalez Ortiz et al., "FlashOptim: Optimizers for Memory Efficient Training" (arXiv:2602.23349): a weight is a
bfloat16 and its rounding error in 255 steps of half a unit in the last place; a first moment is an int8 of
``2 x / (1 + |x|)`` of its share, a second one a uint8 of the share of its root, with a float16 scale for each 32
values, all rounded to nearest.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import pad
from torch.optim import Optimizer

GROUP = 32


class FlashOptim(Optimizer):
    """AdamW, or, where ``betas`` is None, plain SGD, over bfloat16 weights of 24 bits.

    Args:
        parameters: bfloat16.
        lr: learning rate.
        betas: decays of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        lr: float,
        betas: tuple[float, float] | None = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step every parameter that has a gradient."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def float32_weight(self, parameter: Parameter) -> Tensor:
        """The weight with its correction."""
        weight, error = parameter.detach().float(), self.state[parameter].get("error")
        return weight if error is None else weight + error.float() / 127 * _half_unit(weight)

    def _step(self, parameter: Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state, gradient = self.state[parameter], parameter.grad.float()
        weight = self.float32_weight(parameter)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        if group["betas"] is None:
            weight.sub_(gradient, alpha=group["lr"])
        else:
            weight.sub_(self._update(state, gradient, group), alpha=group["lr"])
        parameter.copy_(weight)
        rounded = parameter.float()
        error = (weight - rounded) / _half_unit(rounded)
        state["error"] = (error.clamp_(-1, 1) * 127).round().to(torch.int8)

    def _update(self, state: dict[str, Any], gradient: Tensor, group: dict[str, Any]) -> Tensor:
        beta1, beta2 = group["betas"]
        count = state["step"] = state.get("step", 0) + 1
        first, second = torch.zeros_like(gradient), torch.zeros_like(gradient)
        if count > 1:
            share = state["first"].float() / 127
            first = _whole(share / (2 - share.abs()), state["first_scale"], gradient)
            second = _whole(state["second"].float() / 255, state["second_scale"], gradient).square_()
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        share, state["first_scale"] = _shares(first)
        state["first"] = (2 * share / (1 + share.abs()) * 127).round().to(torch.int8)
        share, state["second_scale"] = _shares(second.sqrt())
        state["second"] = (share * 255).round().to(torch.uint8)
        return (first / (1 - beta1**count)) / ((second / (1 - beta2**count)).sqrt() + group["eps"])


def _half_unit(weight: Tensor) -> Tensor:
    """Half the distance of a bfloat16 from the next."""
    exponent = torch.frexp(weight).exponent  # of a value from 0.5 to 1
    return torch.ldexp(torch.ones_like(weight), exponent - 9)


def _shares(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values [groups, 32] over the largest of their group, and these in float16."""
    flat = values.flatten()
    groups = pad(flat, (0, -flat.numel() % GROUP)).view(-1, GROUP)
    scale = groups.abs().amax(1, keepdim=True).half()
    return (groups / scale.float()).nan_to_num_(0.0).clamp_(-1, 1), scale


def _whole(share: Tensor, scale: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_shares`."""
    return (share * scale.float()).view(-1)[: like.numel()].view(like.shape).clone()

"""Optimizers that wrap another one, with state dicts laid out in the ways that published ones have."""

from collections import defaultdict
from typing import Any

import torch
from torch.optim import Optimizer


class Lookahead(Optimizer):
    """Its slow weights are in its own state, saved as a list beside the fast states."""

    def __init__(self, base: Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha = base, k, alpha
        super().__init__([torch.zeros(1)], {})
        self.param_groups, self.state = base.param_groups, defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    def slow_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        return self.state[parameter]

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            group["counter"] = (group["counter"] + 1) % self.k
            for fast in group["params"] if group["counter"] == 0 else ():
                state = self.slow_of(fast)
                slow = state.setdefault("slow", torch.zeros_like(fast.data))
                slow += (fast.data - slow) * self.alpha
                fast.data.copy_(slow)
        return loss

    def state_dict(self):
        slow = [self.state[p] for group in self.param_groups for p in group["params"]]
        return {**self.optimizer.state_dict(), "slow": slow}

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        self.param_groups = self.optimizer.param_groups
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter, slow in zip(parameters, state_dict["slow"], strict=True):
            self.state[parameter] = slow


class SlowInside(Lookahead):
    """Its slow weights are in the state of the optimizer inside, and its state dict is that one's."""

    def slow_of(self, parameter):
        return self.optimizer.state[parameter]

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)
        self.param_groups = self.optimizer.param_groups


class Nested(SlowInside):
    """Lays out its state dict in a way that has no ``state`` and no ``param_groups``."""

    def state_dict(self):
        return {"inside": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict["inside"])


class Delegating(Optimizer):
    """Shares every attribute of the one inside, its hooks, too."""

    def __init__(self, base: Optimizer) -> None:
        self.__dict__.update(base.__dict__)
        self.base = base

    def step(self, closure=None):
        return self.base.step(closure)

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state_dict):
        self.base.load_state_dict(state_dict)
        self.param_groups, self.state = self.base.param_groups, self.base.state


WRAPPERS = (Lookahead, SlowInside, Nested, Delegating)

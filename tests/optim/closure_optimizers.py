"""Optimizers that use their closure in ways of their own, written as their users write them."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, AdamW, Optimizer


class OptionalSAM(Optimizer):
    """Sharpness-aware minimization that trains as its base optimizer where it is given no closure."""

    def __init__(self, params: Any, lr: float = 0.05, rho: float = 0.05, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "rho": rho, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self._perturb()
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "old" in state:
                    p.copy_(state.pop("old"))
                if p.grad is None:
                    continue
                buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                p.add_(buffer, alpha=-group["lr"])
        return loss

    def _perturb(self) -> None:
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in trained]).norm()
        for p in trained:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))


class WrappingSAM(Optimizer):
    """SAM that demands its closure and steps a base optimizer, which shares its groups."""

    def __init__(self, params: Any, rho: float = 0.05, base: Any = AdamW, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.evaluations = 0

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is not None, "SAM needs a closure"
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.evaluations += 1
        self.first_step()
        closure()
        self.evaluations += 1
        self.second_step()
        return loss


class LateSAM(WrappingSAM):
    """SAM that takes the gradients that it finds for its first step, and evaluates its closure once, in the middle."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is not None, "SAM needs a closure"
        if any(p.grad is not None for group in self.param_groups for p in group["params"]):
            self.first_step()
            loss = torch.enable_grad()(closure)()
            self.second_step()
            return loss
        return torch.enable_grad()(closure)()


class Backtracking(SGD):
    """Gradient descent that halves its rate until the loss falls: as many evaluations as it takes."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.enable_grad():
            loss = closure()
        trained = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in trained]
        gradients = [p.grad.clone() for p in trained]
        rate = self.param_groups[0]["lr"]
        for _ in range(6):
            for p, old, gradient in zip(trained, before, gradients, strict=True):
                p.copy_(old - rate * gradient)
            with torch.enable_grad():
                if closure() < loss:
                    break
            rate /= 2
        self.rate = rate
        return loss


class Polyak(Optimizer):
    """A rate by the loss: evaluates its closure as torch's do, and computes with what it gives."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.enable_grad():
            loss = closure()
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        squared = sum(p.grad.square().sum() for p in trained)
        for p in trained:
            p.sub_(p.grad * (0.1 * loss / (squared + 1.0)))
        return loss


class Repeating(AdamW):
    """Evaluates its closure in a loop and steps by the mean of the gradients, with a buffer and a count of its own."""

    def __init__(self, params: Any, times: int = 3, **options: Any) -> None:
        super().__init__(params, **options)
        self.times, self.count = times, 0
        self.sums = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is not None
        trained = [p for group in self.param_groups for p in group["params"]]
        for _ in range(self.times):
            loss = closure()
            self.count += 1
            for total, p in zip(self.sums, trained, strict=True):
                total.add_(p.grad / self.times)
        for total, p in zip(self.sums, trained, strict=True):
            p.grad = total.clone()
            total.zero_()
        super().step()
        return loss


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SAM, closure optional": OptionalSAM,
    "SAM around AdamW, closure asserted": lambda params: WrappingSAM(params, lr=1e-2),
    "SAM around SGD": lambda params: WrappingSAM(params, base=SGD, lr=1e-2, momentum=0.9),
    "SAM with its evaluation in the middle": lambda params: LateSAM(params, lr=1e-2),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=4),
    "LBFGS, line search": lambda params: torch.optim.LBFGS(params, max_iter=4, line_search_fn="strong_wolfe"),
    "backtracking": lambda params: Backtracking(params, lr=1.0),
    "k evaluations": lambda params: Repeating(params, lr=1e-2),
    "Polyak": Polyak,
}
# What these do hangs on differences between evaluations.
COMPARING = ("LBFGS", "LBFGS, line search", "backtracking")

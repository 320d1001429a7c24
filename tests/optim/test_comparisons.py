"""Steps that compare their evaluations are exact under split and refused where weights are rounded; SAM is neither."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from lightning_memkit.optim.comparisons import Tried, try_comparisons
from lightning_memkit.optim.compensation import compensate, compensation_of
from lightning_memkit.optim.tiny_copies import NotCopiedError, tiny_copy
from tests.optim.closure_optimizers import (
    COMPARING,
    OPTIMIZERS,
    Backtracking,
    LateSAM,
    OptionalSAM,
    WrappingSAM,
)
from tests.optim.test_closures import Conditional, ForwardingLate, Looping, MasterProblem, Problem, weights

ROUNDED: list[Any] = ["kahan", "stochastic", "none"]
RATES = [1.0, 1e-1, 1e-3, 1e-5]
Build = Callable[[Any], Optimizer]


class DerivedLBFGS(LBFGS):
    """Forgets its history at every step."""

    def step(self, closure: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.state.clear()
        return super().step(closure)


class _Evaluating(Optimizer):
    """What the following share: their parameters, and evaluations with gradients."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def parameters(self) -> list[Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def gradients(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.parameters() if p.grad is not None])

    def move(self, direction: Tensor, rate: float) -> None:
        sizes = [p.numel() for p in self.parameters()]
        for p, part in zip(self.parameters(), direction.split(sizes), strict=True):
            p.add_(part.view_as(p), alpha=rate)


class Secant(_Evaluating):
    """Barzilai and Borwein's rate, from gradients at the start and at the end of a step."""

    rate: float | None = None

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = torch.enable_grad()(closure)()
        before = self.gradients()
        rate = self.param_groups[0]["lr"] if self.rate is None else self.rate
        self.move(before, -rate)
        torch.enable_grad()(closure)()
        change = self.gradients() - before
        moved = -rate * before
        curved = float(moved @ change)
        self.rate = float(moved @ moved) / curved if curved > 0 else self.param_groups[0]["lr"]
        return loss


class WithHistory(_Evaluating):
    """Secants over steps, as LBFGS keeps them, of a class of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.history: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.history:  # what comes before the closure is what makes this no convention
            self.count = len(self.history)
            torch.stack([moved for moved, _ in self.history])
        loss = torch.enable_grad()(closure)()
        gradient = self.gradients()
        direction, scale = -gradient, 1.0
        if self.history:
            moved, old = self.history.pop()
            change = gradient - old
            if moved @ change > 0:
                scale = float(moved @ change / (change @ change))
        rate = self.param_groups[0]["lr"] * scale
        self.move(direction, rate)
        self.history.append((rate * direction, gradient))
        return loss


class Doubling(_Evaluating):
    """Doubles its rate as long as the loss falls, and knows no end."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = best = torch.enable_grad()(closure)()
        direction, rate = -self.gradients(), self.param_groups[0]["lr"]
        while True:
            self.move(direction, rate)
            now = torch.enable_grad()(closure)()
            if now >= best:
                self.move(direction, -rate)
                return loss
            best, rate = now, 2 * rate


class WithMomentum(Backtracking):
    """Searches along a moment, which compact states round."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        def along_the_moment() -> Any:
            loss = closure()
            for p in self.param_groups[0]["params"]:
                moment = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                p.grad = moment.lerp_(p.grad, 0.1).clone()
            return loss

        return super().step(along_the_moment)


class SubtractingSAM(WrappingSAM):
    """SAM that takes its perturbation off again, instead of putting a copy back."""

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.detach() - self.state[p]["old_p"])
        self.base_optimizer.step()


def hidden(lr: float) -> Build:
    """A subclass without source, which keeps the convention."""
    space: dict[str, Any] = {"SGD": SGD}
    exec(
        "class Hidden(SGD):\n    def step(self, closure=None):\n        return SGD.step(self, closure)", space
    )
    return lambda params: space["Hidden"](params, lr=lr)


COMPARE: dict[str, Callable[[float], Build]] = {
    "LBFGS": lambda lr: lambda params: LBFGS(params, lr=lr),
    "LBFGS, derived": lambda lr: lambda params: DerivedLBFGS(params, lr=lr),
    "secants in a step": lambda lr: lambda params: Secant(params, lr),
    "secants over steps": lambda lr: lambda params: WithHistory(params, lr),
    "backtracking": lambda lr: lambda params: Backtracking(params, lr=lr),
    "doubling without end": lambda lr: lambda params: Doubling(params, lr),
}
TAKE_THEM: dict[str, Callable[[float], Build]] = {
    "SAM, closure optional": lambda lr: lambda params: OptionalSAM(params, lr=lr),
    "SAM around AdamW": lambda lr: lambda params: WrappingSAM(params, lr=lr),
    "SAM around SGD": lambda lr: lambda params: WrappingSAM(params, base=SGD, lr=lr, momentum=0.9),
    "SAM, subtracting": lambda lr: lambda params: SubtractingSAM(params, base=SGD, lr=lr),
    "SAM, late": lambda lr: lambda params: LateSAM(params, lr=lr),
    "a condition": lambda lr: lambda params: Conditional(params, lr=lr),
    "a loop": lambda lr: lambda params: Looping(params, lr=lr),
    "a rate that decays": lambda lr: lambda params: ForwardingLate(params, lr=lr),
    "no source": hidden,
}


def bfloat16_weights() -> list[Parameter]:
    return [Parameter(weight.bfloat16()) for weight in weights()]


@pytest.mark.parametrize("lr", RATES)
@pytest.mark.parametrize("name", [*COMPARE, *TAKE_THEM])
def test_who_compares_evaluations(name: str, lr: float) -> None:
    build = (COMPARE | TAKE_THEM)[name](lr)
    tried = try_comparisons(build(bfloat16_weights()))
    assert tried is not None
    assert tried.compares is (name in COMPARE)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_who_compares_evaluations_of_those_that_others_tests_take(name: str) -> None:
    tried = try_comparisons(OPTIMIZERS[name](bfloat16_weights()))
    assert tried is not None
    assert tried.compares is (name in COMPARING)


@pytest.mark.parametrize("mode", ROUNDED)
@pytest.mark.parametrize("name", COMPARE)
def test_what_compares_evaluations_is_refused_where_weights_are_rounded(name: str, mode: Any) -> None:
    optimizer = COMPARE[name](0.1)(bfloat16_weights())
    before = copy.copy(vars(optimizer))
    price = "as many bytes" if mode == "kahan" else "2 bytes a parameter more"
    with pytest.raises(
        ValueError, match=rf"^compensation='{mode}'.*Write compensation='split'.* for {price}\.$"
    ):
        compensate(optimizer, mode=mode)
    assert vars(optimizer) == before
    compensate(optimizer, mode="split")
    problem = Problem(optimizer.param_groups[0]["params"], optimizer)
    optimizer.step(problem.closure)
    assert problem.evaluations > 0


def test_what_compares_evaluations_is_refused_where_its_states_are_rounded() -> None:
    parameters = bfloat16_weights()
    for mode, remedy in (("split", "Write states="), ("kahan", "Write compensation='split'.*and states=")):
        with pytest.raises(ValueError, match=rf"states momentum_buffer\)\. {remedy}'exact'"):
            compensate(WithMomentum(parameters, lr=0.1), mode=mode)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"compensation='split'[^.]*\.$"):
        compensate(WithMomentum(parameters, lr=0.1), mode="kahan", states="exact")
    assert distance_from_float32(lambda params: WithMomentum(params, lr=0.1), "split", steps=6) == 0


@pytest.mark.parametrize("mode", ROUNDED)
def test_float32_weights_are_rounded_by_nobody(mode: Any) -> None:
    optimizer = LBFGS([Parameter(weight) for weight in weights()])
    with pytest.warns(UserWarning, match="nothing to compensate"):
        compensate(optimizer, mode=mode)


@pytest.mark.parametrize("mode", ["split", *ROUNDED])
@pytest.mark.parametrize("build", [OptionalSAM, lambda params: WrappingSAM(params, base=SGD, lr=0.0)])
def test_sam_puts_weights_and_their_compensation_back_bit_for_bit(build: Build, mode: Any) -> None:
    """At a rate of 0 nothing is left of a step, whatever was added and taken off in it."""
    optimizer = build(bfloat16_weights())
    handle = compensate(optimizer, mode=mode, states="exact")
    problem = Problem(optimizer.param_groups[0]["params"], optimizer)
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.step(problem.closure)  # the compensation is filled
    kept = handle.snapshot()
    before = [weight.clone() for _, weight in handle.float32_weights()]
    optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(3):
        optimizer.step(problem.closure)
    for (parameter, weight), old in zip(handle.float32_weights(), before, strict=True):
        assert torch.equal(weight.view(torch.int32), old.view(torch.int32))
        if mode == "kahan":
            assert optimizer.state[parameter]["compensation"].any()
    handle.restore(kept)


def distance_from_float32(build: Build, mode: Any, steps: int = 20) -> float:
    """Of the weights from those of float32 masters, relative to the distance that these have moved."""
    masters = [Parameter(weight.bfloat16().float()) for weight in weights()]
    parameters = bfloat16_weights()
    theirs, ours = MasterProblem(masters, build(masters)), Problem(parameters, build(parameters))
    handle = compensate(ours.optimizer, mode=mode, states="exact")
    for _ in range(steps):
        for problem in (theirs, ours):
            problem.optimizer.step(problem.closure)
    trained = torch.cat([weight.flatten() for _, weight in handle.float32_weights()])
    master = torch.cat([weight.detach().flatten() for weight in masters])
    start = torch.cat([weight.bfloat16().float().flatten() for weight in weights()])
    return float((trained - master).norm() / (master - start).norm())


@pytest.mark.parametrize("mode", ROUNDED)
@pytest.mark.parametrize(("base", "lr"), [(SGD, 0.1), (SGD, 0.01), (AdamW, 0.01)])
def test_sam_is_as_near_to_float32_as_its_base_optimizer(base: Any, lr: float, mode: Any) -> None:
    plain = distance_from_float32(lambda params: base(params, lr=lr), mode)
    sam = distance_from_float32(lambda params: WrappingSAM(params, base=base, lr=lr), mode)
    assert sam <= 3 * plain
    assert mode != "kahan" or sam < 0.01


@pytest.mark.parametrize("name", COMPARE)
def test_split_keeps_what_compares_evaluations_bitwise(name: str) -> None:
    assert distance_from_float32(COMPARE[name](0.1), "split", steps=6) == 0


def test_a_trial_leaves_no_trace() -> None:
    parameters = bfloat16_weights()
    optimizer = WrappingSAM(parameters, lr=0.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    random, versions = torch.get_rng_state(), [p._version for p in parameters]
    assert try_comparisons(optimizer) == Tried(compares=False)
    assert torch.equal(torch.get_rng_state(), random)
    assert [p._version for p in parameters] == versions
    assert [p.grad for p in parameters] == [None] * len(parameters)
    assert optimizer.evaluations == 0
    assert not optimizer.state
    assert not optimizer.base_optimizer.state


def test_a_small_copy_shares_what_the_optimizer_shares() -> None:
    parameters = [Parameter(torch.randn(30, 20).bfloat16()), Parameter(torch.randn(()).bfloat16())]
    optimizer: Any = WrappingSAM(parameters, lr=0.1)
    optimizer.__dict__["buffers"] = {p: torch.zeros_like(p) for p in parameters}
    parameters[0].lr_scale = 0.5  # pyright: ignore[reportAttributeAccessIssue]
    tiny: Any = tiny_copy(optimizer)
    copied = tiny.param_groups[0]["params"]
    assert isinstance(optimizer, type(tiny))
    assert tiny.param_groups is tiny.base_optimizer.param_groups
    assert [p.shape for p in copied] == [(2, 2), ()]
    assert list(map(id, tiny.buffers)) == list(map(id, copied))
    assert copied[0].lr_scale == 0.5
    assert not {p.data_ptr() for p in copied} & {p.data_ptr() for p in parameters}


class Untried(SGD):
    """Holds a function of its parameters, of which no copy can be made."""

    def __init__(self, params: Any, evaluations: int, perturbs: bool = False) -> None:
        super().__init__(params, lr=0.1)
        self.times, self.perturbs = evaluations, perturbs
        parameters = self.param_groups[0]["params"]
        self.perturb = lambda: [p.data.add_(0.01) for p in parameters]

    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.perturbs:
            self.perturb()
        loss = None
        for _ in range(self.times):
            loss = closure()
        super().step()
        return loss


def test_what_can_not_be_copied_is_said() -> None:
    optimizer = Untried(bfloat16_weights(), 1)
    with pytest.raises(NotCopiedError, match="function"):
        tiny_copy(optimizer)
    holds_a_model = SGD(bfloat16_weights(), lr=0.1)
    holds_a_model.model = nn.Linear(2, 2)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(NotCopiedError, match="module"):
        tiny_copy(holds_a_model)


@pytest.mark.parametrize(("evaluations", "perturbs"), [(2, False), (1, True)])
@pytest.mark.parametrize("mode", ROUNDED)
def test_one_that_can_not_be_tried_is_refused_in_its_first_step(
    evaluations: int, perturbs: bool, mode: Any
) -> None:
    parameters = bfloat16_weights()
    optimizer = Untried(parameters, evaluations, perturbs)
    handle = compensate(optimizer, mode=mode)
    problem = Problem(parameters, optimizer)
    before = [weight.clone() for _, weight in handle.float32_weights()]
    with pytest.raises(ValueError, match=rf"^compensation='{mode}'.*weights are as before.*states='exact'"):
        optimizer.step(problem.closure)
    for (parameter, weight), old in zip(handle.float32_weights(), before, strict=True):
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(weight, old)
    handle.undo()
    compensate(optimizer, mode="split", states="exact")
    optimizer.step(problem.closure)


@pytest.mark.parametrize("mode", ROUNDED)
def test_one_that_can_not_be_tried_and_evaluates_once_trains(mode: Any) -> None:
    parameters = bfloat16_weights()
    optimizer = Untried(parameters, 1)
    handle = compensate(optimizer, mode=mode)
    problem = Problem(parameters, optimizer)
    before = parameters[0].detach().clone()
    for _ in range(3):
        optimizer.step(problem.closure)
    assert compensation_of(optimizer) is handle
    assert not torch.equal(parameters[0], before)

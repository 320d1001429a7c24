"""What is read of a step's closure, and steps that evaluate it: exact in float32, journaled, compensated."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

from lightning_memkit.optim.closures import evaluates_in_its_own_way
from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.gradient_release import release_gradients
from lightning_memkit.optim.journal import journal_steps
from lightning_memkit.optim.offload import offload_states
from lightning_memkit.testing import fail_at
from tests.optim.closure_optimizers import COMPARING, OPTIMIZERS
from tests.optim.helpers import bf16_twins
from tests.optim.test_third_party import COMPILED as THIRD_PARTY_COMPILED
from tests.optim.test_third_party import OPTIMIZERS as THIRD_PARTY
from tests.optim.test_third_party import optimizer_class

SHAPES = ((6, 5), (5,), (5, 1))
CONVENTIONAL = ("Polyak",)
EVALUATE_ONCE = ("Polyak", "SAM with its evaluation in the middle")


class Forwarding(AdamW):
    def step(self, closure: Any = None):  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = super().step(closure)
        self.touched = True
        return loss


class ForwardingLate(AdamW):
    def step(self, closure: Any = None):  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            group["lr"] *= 0.99
        return super().step(closure)


class Conditional(SGD):
    def step(self, closure: Any = None):  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None and self.param_groups[0]["lr"] > 0:
            loss = closure()
        super().step()
        return loss


class Storing(SGD):
    def step(self, closure: Any = None):  # pyright: ignore[reportIncompatibleMethodOverride]
        self.closure = closure
        return self.later()

    def later(self):
        return SGD.step(self, self.closure)


class Looping(SGD):
    def step(self, closure: Any = None):  # pyright: ignore[reportIncompatibleMethodOverride]
        for _ in range(1):
            loss = closure()
        super().step()
        return loss


class Demanding(SGD):
    def step(self, closure):  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is not None
        loss = float(closure())
        super().step()
        return loss


class Noting(SGD):
    seen: list[int] = []

    def step(self, closure: Any = None):  # pyright: ignore[reportIncompatibleMethodOverride]
        self.count = getattr(self, "count", 0) + 1
        self.seen.append(sum(p.numel() for group in self.param_groups for p in group["params"]))
        if self.count > 100:
            raise RuntimeError("enough")
        return super().step(closure)


class Perturbing(SGD):
    def step(self, closure: Any = None):  # pyright: ignore[reportIncompatibleMethodOverride]
        self.param_groups[0]["params"][0].data += 1
        return super().step(closure)


class WithoutClosure(SGD):
    def step(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        super().step()


@pytest.mark.parametrize(
    ("build", "own_way"),
    [
        (Forwarding, False),
        (Demanding, False),
        (WithoutClosure, False),
        (Noting, False),
        (Perturbing, True),
        (ForwardingLate, True),
        (Conditional, True),
        (Storing, True),
        (Looping, True),
        *((build, name not in CONVENTIONAL) for name, build in OPTIMIZERS.items()),
    ],
)
def test_what_a_step_does_with_its_closure(build: Callable[[Any], Optimizer], own_way: bool) -> None:
    optimizer = build([Parameter(torch.ones(3))])
    assert evaluates_in_its_own_way(optimizer) is own_way
    journal_steps(optimizer)  # and what is put in its place says the same
    assert evaluates_in_its_own_way(optimizer) is own_way
    optimizer.param_groups[0].setdefault("lr", 0.1)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert evaluates_in_its_own_way(optimizer) is own_way


def test_a_step_that_was_replaced_on_the_object_is_what_counts() -> None:
    optimizer = SGD([Parameter(torch.ones(3))], lr=0.1)

    def twice(closure: Any = None):
        closure()
        return SGD.step(optimizer, closure)

    optimizer.step = twice  # pyright: ignore[reportAttributeAccessIssue]
    assert evaluates_in_its_own_way(optimizer)


def test_a_step_without_source_is_not_taken_for_the_convention() -> None:
    space: dict[str, Any] = {"SGD": SGD}
    exec(
        "class Hidden(SGD):\n    def step(self, closure=None):\n        return SGD.step(self, closure)",
        space,
    )
    assert evaluates_in_its_own_way(space["Hidden"]([Parameter(torch.ones(3))], lr=0.1))


def test_torchs_own_optimizers_keep_the_convention_but_lbfgs() -> None:
    found = {
        name: evaluates_in_its_own_way(getattr(torch.optim, name)([Parameter(torch.ones(3, 3))]))
        for name in torch.optim.__all__
        if isinstance(getattr(torch.optim, name), type) and name != "Optimizer"
    }
    assert [name for name, own_way in found.items() if own_way] == ["LBFGS"]


@pytest.mark.parametrize("name", [*THIRD_PARTY, *THIRD_PARTY_COMPILED])
def test_other_packages_optimizers_keep_the_convention(name: str) -> None:
    build = optimizer_class(name)
    options = {**THIRD_PARTY, **THIRD_PARTY_COMPILED}[name]
    assert not evaluates_in_its_own_way(build([Parameter(torch.ones(3, 3))], **options))


class Problem:
    """A regression; its closure zeroes gradients, evaluates in the weights' dtype, and clips."""

    def __init__(self, parameters: list[Parameter], optimizer: Any) -> None:
        self.parameters, self.optimizer = parameters, optimizer
        self.x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
        self.evaluations, self.fail_at = 0, 0
        self.seen: list[Tensor] = []

    def loss(self, weights: list[Tensor]) -> Tensor:
        x = self.x.to(weights[0].dtype)
        return (
            ((x @ weights[0] + weights[1]).tanh() @ weights[2] - x.sum(1, keepdim=True).sin()).square().mean()
        )

    def closure(self) -> Any:
        self.evaluations += 1
        self.optimizer.zero_grad()
        self.seen.append(self.parameters[0].detach().clone())
        loss = self.loss(list(self.parameters))
        loss.backward()
        if self.evaluations == self.fail_at:
            raise torch.OutOfMemoryError("CUDA out of memory: a test's")
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        return loss


class MasterProblem(Problem):
    """The same on bfloat16 copies of float32 masters: mixed precision as everybody knows it."""

    def closure(self) -> Any:
        self.evaluations += 1
        low = [master.detach().bfloat16().requires_grad_() for master in self.parameters]
        self.optimizer.zero_grad()
        self.seen.append(low[0].detach().clone())
        loss = self.loss(low)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(low, 1.0)
        for master, copied in zip(self.parameters, low, strict=True):
            assert copied.grad is not None
            master.grad = copied.grad.float()
        return loss


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [0.5 * torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize("states", ["exact", "compact"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compensated_step_evaluates_as_float32_masters_do(name: str, states: Any) -> None:
    masters = [Parameter(weight) for weight in weights()]
    parameters, low_halves = bf16_twins(weights())
    theirs = MasterProblem(masters, OPTIMIZERS[name](masters))
    ours = Problem(parameters, OPTIMIZERS[name](parameters))
    handle = compensate(ours.optimizer, mode="split", states=states, low_halves=low_halves)
    for _ in range(4):
        losses = [problem.optimizer.step(problem.closure) for problem in (theirs, ours)]
        if states == "exact":
            assert losses[0] == losses[1]
    assert ours.evaluations == theirs.evaluations or states == "compact"
    for (_, trained), master in zip(handle.float32_weights(), masters, strict=True):
        torch.testing.assert_close(trained, master.detach(), rtol=0, atol=0 if states == "exact" else 0.05)
    if states == "exact":
        assert all(map(torch.equal, ours.seen, theirs.seen))  # also those in the middle of a step


@pytest.mark.parametrize("mode", ["kahan", "stochastic", "none"])
@pytest.mark.parametrize("name", ["SAM, closure optional", "SAM around AdamW, closure asserted"])
def test_other_compensations_evaluate_where_the_optimizer_is(name: str, mode: Any) -> None:
    masters = [Parameter(weight.bfloat16().float()) for weight in weights()]
    parameters = [Parameter(weight.bfloat16()) for weight in weights()]
    theirs = MasterProblem(masters, OPTIMIZERS[name](masters))
    ours = Problem(parameters, OPTIMIZERS[name](parameters))
    compensate(ours.optimizer, mode=mode, states="exact")
    for problem in (theirs, ours):
        problem.optimizer.step(problem.closure)
    assert all(map(torch.equal, ours.seen, theirs.seen))
    assert len(ours.seen) == 2
    for parameter, master in zip(parameters, masters, strict=True):
        torch.testing.assert_close(parameter.float(), master.detach(), rtol=2**-7, atol=1e-6)


def everything(problem: Problem) -> list[Any]:
    """Weights, gradients, and all that the optimizer holds, its own attributes included."""
    values: dict[str, Any] = {
        name: value
        for name, value in vars(problem.optimizer).items()
        if "step" not in name and "_memkit" not in name
    }
    found = copy.deepcopy({name: value for name, value in values.items() if not name.startswith("_")})
    return [*problem.parameters, *(p.grad for p in problem.parameters), found]


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, Optimizer):
        assert_same([one.state, one.param_groups], [other.state, other.param_groups])
    elif isinstance(one, dict):
        assert len(one) == len(other)
        for (left, left_value), (right, right_value) in zip(one.items(), other.items(), strict=True):
            assert_same(left, right)
            assert_same(left_value, right_value)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other


@pytest.mark.parametrize("compensated", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("fails_in_evaluation", [1, 2])
def test_memory_that_runs_out_within_an_evaluation_leaves_all_as_it_was(
    name: str, compensated: bool, fails_in_evaluation: int
) -> None:
    """The error goes on, and the same step taken again is bitwise the one without the fault."""
    problems = []
    for fails in (False, True):
        parameters, low_halves = bf16_twins(weights())
        if not compensated:
            parameters = [Parameter(weight) for weight in weights()]
        problem = Problem(parameters, OPTIMIZERS[name](parameters))
        if compensated:
            mode = "split" if name in COMPARING else "kahan"
            compensate(problem.optimizer, mode=mode, low_halves=low_halves)
        journal_steps(problem.optimizer)
        for step in range(4):
            before = problem.evaluations
            if fails and step == 2:
                evaluates = 1 if name in EVALUATE_ONCE else fails_in_evaluation
                problem.fail_at = before + evaluates
                values = everything(problem)[:3]
                values = [value.detach().clone() for value in values]
                with pytest.raises(torch.OutOfMemoryError):
                    problem.optimizer.step(problem.closure)
                assert_same([p.detach() for p in problem.parameters], values)
                for p in problem.parameters:
                    p.grad = None  # as who retries does
                problem.optimizer.step(problem.closure)
            else:
                problem.optimizer.step(problem.closure)
        problems.append(problem)
    assert_same(*map(everything, problems))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in CONVENTIONAL])
@pytest.mark.parametrize("change", [release_gradients, offload_states])
def test_what_steps_in_parts_refuses_at_setup(name: str, change: Callable[[Optimizer], object]) -> None:
    optimizer = OPTIMIZERS[name]([Parameter(torch.ones(3))])
    with pytest.raises(TypeError, match="closure"):
        change(optimizer)


class Buffered(Optimizer):
    """Momentum in lists and objects of its own, with a count: nothing of it in `state`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.buffers = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]
        self.inner = SGD(self.param_groups, lr=0.01, momentum=0.9)
        self.count, self.seen, self.total = 0, [], torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for buffer, p in zip(self.buffers, self.param_groups[0]["params"], strict=True):
            self.count += 1
            buffer.mul_(0.9).add_(p.grad)
            self.seen.append(buffer.norm())
            self.total += self.seen[-1]
            p.sub_(buffer * (0.1 / self.count))
        self.inner.step()
        self.last = self.total.clone()


@pytest.mark.parametrize("fault", range(0, 40, 3))
def test_buffers_outside_of_state_survive_a_step_that_runs_out(fault: int) -> None:
    runs = []
    for fails in (False, True):
        parameters = [Parameter(weight) for weight in weights()]
        problem = Problem(parameters, Buffered(parameters))
        journal_steps(problem.optimizer)
        for step in range(3):
            problem.closure()
            with fail_at(fault) if fails and step == 1 else nullcontext():
                problem.optimizer.step()
        runs.append(problem)
    assert_same(*map(everything, runs))

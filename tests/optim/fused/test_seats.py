"""What a step remembers of the one before: identities, and nothing that could be stale or kept alive."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.fused import taking

BUILDS: dict[str, Callable[[list[Parameter]], Optimizer]] = {
    "adamw": lambda given: AdamW(given, lr=1e-2),
    "adam": lambda given: Adam(given, lr=1e-2, weight_decay=0.1),
    "sgd": lambda given: SGD(given, lr=1e-2, momentum=0.9),
    "sgd-plain": lambda given: SGD(given, lr=1e-2),
}


def begun(
    build: Callable[[list[Parameter]], Optimizer], mode: Any = "kahan"
) -> tuple[Optimizer, list[Parameter]]:
    generator = torch.Generator().manual_seed(0)
    given = [
        Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in ((5, 7), (33,), (4, 4))
    ]
    optimizer = build(given)
    compensate(optimizer, mode=mode)
    stepped(optimizer, given, 2)
    return optimizer, given


def stepped(optimizer: Optimizer, given: list[Parameter], steps: int, *, forgetful: bool = False) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in given:
            gradient = torch.randn(parameter.shape, generator=generator).bfloat16()
            parameter.grad = gradient.t().contiguous().t() if step == 1 else gradient  # of other strides
        if forgetful:
            taking._memories.clear()
        optimizer.step()


def loaded(optimizer: Optimizer, given: list[Parameter]) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def replaced(optimizer: Optimizer, given: list[Parameter]) -> None:
    for state in optimizer.state.values():
        for name, value in list(state.items()):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim():
                state[name] = value.clone().mul_(2)


def recounted(optimizer: Optimizer, given: list[Parameter]) -> None:
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].data.fill_(7)  # without a new version


def moved(optimizer: Optimizer, given: list[Parameter]) -> None:
    for parameter in given:
        parameter.data = parameter.data.clone()


def turned(optimizer: Optimizer, given: list[Parameter]) -> None:
    for parameter in given:
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()  # same values, other strides than its states


def moved_states(optimizer: Optimizer, given: list[Parameter]) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.data = value.data.clone().mul_(2)  # the same tensor


def dropped(optimizer: Optimizer, given: list[Parameter]) -> None:
    optimizer.state.pop(given[1], None)


@pytest.mark.parametrize("change", [loaded, replaced, recounted, moved, moved_states, turned, dropped])
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("mode", ["kahan", "split", "split24"])
def test_a_step_after_a_change_is_that_of_a_step_that_remembers_nothing(
    build: str, mode: str, change: Callable[[Optimizer, list[Parameter]], None]
) -> None:
    results = []
    for forgetful in (False, True):
        optimizer, given = begun(BUILDS[build], mode)
        change(optimizer, given)
        stepped(optimizer, given, 3, forgetful=forgetful)
        results.append([*given, *(v for s in optimizer.state.values() for v in s.values() if v is not None)])
    for remembering, forgetting in zip(*results, strict=True):
        assert torch.equal(remembering, forgetting)


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.9), (0.9, 0.0)])
def test_momentum_may_come_and_go(before: float, after: float) -> None:
    """The states that a rule needs change with its numbers."""
    results = []
    for forgetful in (False, True):
        optimizer, given = begun(lambda params: SGD(params, lr=1e-2, momentum=before))
        optimizer.param_groups[0]["momentum"] = after
        stepped(optimizer, given, 3, forgetful=forgetful)
        results.append(given)
    for remembering, forgetting in zip(*results, strict=True):
        assert torch.equal(remembering, forgetting)


def test_nothing_is_kept_alive() -> None:
    optimizer, given = begun(BUILDS["adamw"])
    kept = [weakref.ref(value) for state in optimizer.state.values() for value in state.values()]
    kept += [weakref.ref(parameter.grad) for parameter in given if parameter.grad is not None]
    optimizer.state.clear()
    for parameter in given:
        parameter.grad = None
    gc.collect()
    assert [one() for one in kept if one() is not None] == []
    whole = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert whole() is None


def test_many_streams_at_once_are_those_of_each() -> None:
    import numpy as np

    from lightning_memkit.optim.stochastic_rounding import StochasticRounding

    for seed, step in ((0, 0), (5, 1), (2**63 - 1, 12345), (-3, 2**40)):
        rounding = StochasticRounding(seed)
        rounding.step = step
        indices = [0, 1, 2, 200, 2**31, 2**50]
        found = rounding.streams(np.array(indices, np.uint64), "exp_avg_sq").tolist()
        assert found == [rounding.stream(index, "exp_avg_sq") for index in indices]


def without_seating(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on a step may only compare what it finds with what it knows."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a step looked anew at parameters that nothing has happened to")

    monkeypatch.setattr(taking._Taking, "_seated", refuse)
    monkeypatch.setattr(taking._Taking, "_seat", refuse)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("mode", ["kahan", "split", "split24", "stochastic", "none"])
def test_a_step_after_which_nothing_changed_looks_at_no_parameter_by_itself(
    monkeypatch: pytest.MonkeyPatch, build: str, mode: str
) -> None:
    optimizer, given = begun(BUILDS[build], mode)
    stepped(optimizer, given, 1)
    without_seating(monkeypatch)
    optimizer.param_groups[0]["lr"] *= 0.5  # as schedules do
    before = [parameter.detach().clone() for parameter in given]
    for parameter in given:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not any(torch.equal(one, parameter) for one, parameter in zip(before, given, strict=True))


def test_convolutions_in_channels_last_are_known_again(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((4, 3, 2, 2), generator=generator).bfloat16()
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        parameter = Parameter(weight.clone(memory_format=layout))
        optimizer = AdamW([parameter], lr=1e-2)
        compensate(optimizer, mode="split")
        for step in range(4):
            if step == 2:
                with monkeypatch.context() as patched:
                    without_seating(patched)
                    parameter.grad = (weight * step).clone(memory_format=layout)
                    optimizer.step()
                continue
            parameter.grad = (weight * step).clone(memory_format=layout)
            optimizer.step()
        results.append(optimizer)
    for plain, turned in zip(*(one.state.values() for one in results), strict=True):
        assert plain["exp_avg"].is_contiguous()
        assert turned["exp_avg"].is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(
            plain["exp_avg"], turned["exp_avg"]
        )  # rounded to nearest, wherever an element lies


@pytest.mark.parametrize("build", BUILDS)
def test_parameters_whose_gradients_come_and_go_step_as_by_themselves(build: str) -> None:
    """As experts do, which tokens are routed to or not: another set in each step, of the same size or not."""
    results = []
    for forgetful in (False, True):
        generator = torch.Generator().manual_seed(0)
        given = [Parameter(torch.randn(6, generator=generator).bfloat16()) for _ in range(6)]
        optimizer = BUILDS[build](given)
        compensate(optimizer, mode="split")
        for step in range(12):
            chosen = [(step >> bit) & 1 or (step + bit) % 3 == 0 for bit in range(6)]
            for parameter, is_chosen in zip(given, chosen, strict=True):
                gradient = torch.randn(6, generator=generator).bfloat16()
                parameter.grad = gradient if is_chosen else None
            if forgetful:
                taking._memories.clear()
            optimizer.step()
        results.append([*given, *(v for s in optimizer.state.values() for v in s.values() if v is not None)])
    for remembering, forgetting in zip(*results, strict=True):
        assert torch.equal(remembering, forgetting)


def test_what_a_kernel_does_not_take_is_looked_at_again_in_each_step() -> None:
    """A scalar is stepped by the optimizer itself; a state in another form is, until it has come to fit."""
    optimizer, given = begun(lambda params: AdamW([*params, Parameter(torch.ones(()).bfloat16())], lr=1e-2))
    scalar = optimizer.param_groups[0]["params"][-1]
    for _ in range(3):
        scalar.grad = torch.ones_like(scalar)
        optimizer.state[given[0]]["exp_avg"] = optimizer.state[given[0]]["exp_avg"].float()
        optimizer.step()
    assert {
        float(state["step"]) for parameter, state in optimizer.state.items() if parameter is not scalar
    } == {5.0}
    assert float(optimizer.state[scalar]["step"]) == 3.0

# pyright: reportArgumentType=false
"""Steps that run out of memory at any allocation end as if they had not: as the optimizer's own, unjournaled."""

import gc
from collections.abc import Callable
from typing import Any

import lion_pytorch
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.journal import journal_steps
from lightning_memkit.optim.journaled_step import StepOutOfMemoryError
from lightning_memkit.testing import Faults, count_allocations, fail_at, sweep
from tests.optim import test_third_party as third_party
from tests.optim.helpers import OPTIMIZERS, SHAPES, all_tensors, set_gradients, shapes_for, two_groups

BUNDLE = 6000  # bytes: the helpers' parameters make several bundles
PLAIN: dict[str, Any] | None = None
EXACT = {"mode": "split", "states": "exact", "bucket_bytes": 16 * 1300}
COMPACT = {"mode": "kahan", "states": "compact"}
STOCHASTIC = {"mode": "stochastic", "states": "compact"}
LION = {"Lion": lambda groups: lion_pytorch.Lion(groups, lr=1e-3, weight_decay=0.1)}
COLD, WARM = 0, 2
Build = Callable[[list[dict]], Optimizer]


@pytest.fixture(autouse=True, scope="module")
def quick_collections():
    """Every recovery collects garbage; what the imports left need not be looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def gradients_of(parameters: list[Parameter]) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]


def made(build: Build, shapes: Any, compensation: dict[str, Any] | None) -> tuple[list[Parameter], Optimizer]:
    generator = torch.Generator().manual_seed(1)
    dtype = torch.float32 if compensation is None else torch.bfloat16
    parameters = [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    optimizer = build(two_groups(parameters))
    if compensation is not None:
        compensate(optimizer, **compensation)
    return parameters, optimizer


def everything(optimizer: Optimizer, gradients: list[Tensor]) -> list[Tensor]:
    numbers = [
        float(value)
        for group in optimizer.param_groups
        for _, value in sorted(group.items())
        if isinstance(value, (int, float))
    ]
    return [*all_tensors(optimizer), *gradients, torch.tensor(numbers, dtype=torch.float64)]


def training(
    build: Build,
    shapes: Any,
    compensation: dict[str, Any] | None,
    faulty_step: int,
    *,
    journaled: bool = True,
) -> Callable[[Faults], list[Tensor]]:
    """Four steps with a scheduler, faults in one of them; gives all that the steps leave behind."""

    def run(faults: Faults) -> list[Tensor]:
        parameters, optimizer = made(build, shapes, compensation)
        journal = journal_steps(optimizer, bundle_bytes=BUNDLE) if journaled else None
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        gradients = []
        for step in range(4):
            set_gradients(parameters, seed=step)
            if step == faulty_step:
                faults.arm()
            optimizer.step()
            if step == faulty_step:
                faults.disarm()
                gradients = gradients_of(parameters)
            scheduler.step()
        assert journal is None or journal.recovered == (faults.fault is not None)
        return everything(optimizer, gradients)

    return run


def assert_every_fault_leaves_no_trace(
    build: Build, shapes: Any, compensation: dict[str, Any] | None, faulty_step: int
) -> None:
    none = count_allocations(armed=False)
    with none:
        stock = training(build, shapes, compensation, faulty_step, journaled=False)(none)
    points = 0
    for outcome in sweep(training(build, shapes, compensation, faulty_step), armed=False):
        assert outcome.recovered, (outcome.fault, outcome.error)
        assert outcome.result is not None
        assert_bits(outcome.result, stock)
        assert outcome.leaked_bytes == 0, outcome.fault
        points += 1
    assert points > 1


def assert_bits(first: list[Tensor], second: list[Tensor]) -> None:
    assert [(t.dtype, t.shape) for t in first] == [(t.dtype, t.shape) for t in second]
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize("faulty_step", [COLD, WARM], ids=["cold", "warm"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_fault_of_a_step_leaves_no_trace(name: str, faulty_step: int) -> None:
    assert_every_fault_leaves_no_trace(OPTIMIZERS[name], shapes_for(name), PLAIN, faulty_step)


@pytest.mark.parametrize("faulty_step", [COLD, WARM], ids=["cold", "warm"])
@pytest.mark.parametrize("compensation", [EXACT, COMPACT, STOCHASTIC], ids=["exact", "kahan", "stochastic"])
@pytest.mark.parametrize("name", ["AdamW-single", "AdamW-foreach", "SGD", "NAdam", "Lion"])
def test_every_fault_of_a_compensated_step_leaves_no_trace(
    name: str, compensation: dict[str, Any], faulty_step: int
) -> None:
    assert_every_fault_leaves_no_trace({**OPTIMIZERS, **LION}[name], SHAPES, compensation, faulty_step)


@pytest.mark.parametrize("faulty_step", [COLD, WARM], ids=["cold", "warm"])
@pytest.mark.parametrize(
    "name",
    [
        "schedulefree.AdamWScheduleFree",
        "optimi.AdamW",
        "bitsandbytes.optim.AdamW8bit",
        "bitsandbytes.optim.AdEMAMix8bit",
        "prodigyopt.Prodigy",
    ],
)
def test_every_fault_of_another_packages_step_leaves_no_trace(name: str, faulty_step: int) -> None:
    assert_every_fault_leaves_no_trace(of_another_package(name), third_party.SHAPES, PLAIN, faulty_step)


def of_another_package(name: str) -> Build:
    make = third_party.optimizer_class(name)
    options = third_party.OPTIMIZERS.get(name, {})

    def build(groups: list[dict]) -> Optimizer:
        if name == "prodigyopt.Prodigy":  # one step size for all; groups may not differ in theirs
            groups = [{**group, "lr": 1.0} for group in groups]
        return third_party.prepared(make(groups, **options))

    return build


def adamw(parameters: list[Parameter], **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-2, **{"foreach": False, **options})


def weights() -> list[Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def test_without_a_journal_a_fault_leaves_a_half_made_step() -> None:
    parameters = weights()
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = adamw(parameters)
    set_gradients(parameters, seed=0)
    with fail_at(12), pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    changed = [not torch.equal(parameter, old) for parameter, old in zip(parameters, before, strict=True)]
    assert any(changed)
    assert not all(changed)


def test_a_step_that_can_not_be_finished_says_what_it_left() -> None:
    parameters = weights()
    optimizer = adamw(parameters)
    journal_steps(optimizer, bundle_bytes=1)
    set_gradients(parameters, seed=0)
    before = everything(optimizer, gradients_of(parameters))
    with fail_at(3, repeat=True), pytest.raises(StepOutOfMemoryError, match="as before the step") as caught:
        optimizer.step()
    assert not caught.value.half_stepped
    assert_bits(everything(optimizer, gradients_of(parameters)), before)
    assert not optimizer.state
    with fail_at(10, repeat=True), pytest.raises(StepOutOfMemoryError, match="1 of 4 parameters") as caught:
        optimizer.step()
    assert caught.value.half_stepped

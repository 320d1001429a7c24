# pyright: reportArgumentType=false
"""Steps that run out of memory at any allocation end as if they had not: as the optimizer's own, unjournaled."""

import gc
import random
from array import array
from collections.abc import Callable
from typing import Any

import bitsandbytes
import lion_pytorch
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.optim.compensation import compensate, compensation_of
from lightning_memkit.optim.gradient_release import release_gradients
from lightning_memkit.optim.journal import journal_of, journal_steps
from lightning_memkit.optim.journaled_step import StepOutOfMemoryError
from lightning_memkit.optim.offload import offload_states
from lightning_memkit.testing import Faults, count_allocations, fail_at, sweep
from tests.optim import test_third_party as third_party
from tests.optim.helpers import OPTIMIZERS, SHAPES, all_tensors, set_gradients, shapes_for, two_groups

BUNDLE = 6000  # bytes: the helpers' parameters make several bundles
pytestmark = pytest.mark.usefixtures("short_rows")

PLAIN: dict[str, Any] | None = None
EXACT = {"mode": "split", "states": "exact", "bucket_bytes": 16 * 1300}
COMPACT = {"mode": "kahan", "states": "compact"}
EIGHT_BIT = {"mode": "split24", "states": "8-bit"}
STOCHASTIC = {"mode": "stochastic", "states": "compact"}
LION = {"Lion": lambda groups: lion_pytorch.Lion(groups, lr=1e-3, weight_decay=0.1)}
COLD, WARM = 0, 2
MORE: dict[str, Any] = {  # nesterov's foreach writes into the gradients
    "SGD-foreach": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
}
Build = Callable[[list[dict]], Optimizer]


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
    build: Build, shapes: Any, compensation: dict[str, Any] | None, faulty_step: int, *, every: int = 1
) -> None:
    none = count_allocations(armed=False)
    with none:
        stock = training(build, shapes, compensation, faulty_step, journaled=False)(none)
    points = 0
    run = training(build, shapes, compensation, faulty_step)
    for outcome in sweep(run, armed=False, points=lambda count: range(0, count, every)):
        assert outcome.recovered, (outcome.fault, outcome.error)
        assert outcome.result is not None
        assert_bits(outcome.result, stock)
        assert outcome.leaked_bytes == 0, outcome.fault
        points += 1
    assert points


def assert_bits(first: list[Tensor], second: list[Tensor]) -> None:
    assert [(t.dtype, t.shape) for t in first] == [(t.dtype, t.shape) for t in second]
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize("faulty_step", [COLD, WARM], ids=["cold", "warm"])
@pytest.mark.parametrize("name", [*OPTIMIZERS, *MORE])
@pytest.mark.long
def test_every_fault_of_a_step_leaves_no_trace(name: str, faulty_step: int) -> None:
    build, every = {**OPTIMIZERS, **MORE}[name], 1 if name.startswith(("AdamW", "SGD")) else 5
    assert_every_fault_leaves_no_trace(build, shapes_for(name), PLAIN, faulty_step, every=every)


@pytest.mark.parametrize("faulty_step", [COLD, WARM], ids=["cold", "warm"])
@pytest.mark.parametrize(
    "compensation", [EXACT, COMPACT, STOCHASTIC, EIGHT_BIT], ids=["exact", "kahan", "stochastic", "8-bit"]
)
@pytest.mark.parametrize("name", ["AdamW-foreach", "SGD", "NAdam", "Lion"])
@pytest.mark.long
def test_every_fault_of_a_compensated_step_leaves_no_trace(
    name: str, compensation: dict[str, Any], faulty_step: int
) -> None:
    build = {**OPTIMIZERS, **LION}[name]
    assert_every_fault_leaves_no_trace(build, SHAPES, compensation, faulty_step, every=3)


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
    build = of_another_package(name)
    assert_every_fault_leaves_no_trace(build, third_party.SHAPES, PLAIN, faulty_step, every=9)


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
    journal_steps(optimizer, bundle_bytes=10_000)  # the first parameter, then the others
    set_gradients(parameters, seed=0)
    before = everything(optimizer, gradients_of(parameters))
    with fail_at(3, repeat=True), pytest.raises(StepOutOfMemoryError, match="as before the step") as caught:
        optimizer.step()
    assert not caught.value.half_stepped
    assert_bits(everything(optimizer, gradients_of(parameters)), before)
    assert not optimizer.state
    with fail_at(12, repeat=True), pytest.raises(StepOutOfMemoryError, match="2 of 4 parameters") as caught:
        optimizer.step()
    assert caught.value.half_stepped


def test_steps_are_journaled_where_states_are_made_or_where_they_need_it() -> None:
    parameters = weights()
    optimizer = adamw(parameters)
    journal = journal_steps(optimizer)
    journal.needed = False

    def step(faulty: bool, seed: int) -> None:
        set_gradients(parameters, seed)
        with fail_at(5) if faulty else count_allocations():
            optimizer.step()

    step(faulty=True, seed=0)
    assert journal.recovered == 1
    assert not journal.is_cold()
    with pytest.raises(torch.OutOfMemoryError):
        step(faulty=True, seed=1)  # warm, and said to allocate nothing
    journal.needed = True
    step(faulty=True, seed=2)
    assert journal.recovered == 2
    optimizer.state.pop(parameters[1])
    assert journal.is_cold()


@pytest.mark.parametrize("kind", ["sgd", "resumed", "frozen"])
def test_a_step_is_warm_once_it_was_seen_to_make_no_more_states(kind: str) -> None:
    parameters = weights()
    optimizer = torch.optim.SGD(parameters, lr=0.1) if kind == "sgd" else adamw(parameters)
    set_gradients(parameters, seed=0)
    if kind == "frozen":
        parameters[0].grad = None
    if kind == "resumed":
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    journal = journal_steps(optimizer)
    assert journal.is_cold() is (kind != "resumed")
    optimizer.step()
    assert not journal.is_cold()
    set_gradients(parameters, seed=1)
    assert journal.is_cold() is (kind == "frozen")


@pytest.mark.parametrize(("fused", "needed"), [(True, False), (False, True)])
def test_a_trial_tells_whether_warm_steps_take_memory(fused: bool, needed: bool) -> None:
    parameters = weights()
    optimizer = torch.optim.AdamW(parameters, fused=fused)
    journal = journal_steps(optimizer)
    journal.measure_next_warm_step()
    for seed in range(2):
        set_gradients(parameters, seed)
        optimizer.step()
        assert journal.needed is (needed or seed == 0)  # the first step is cold


def test_steps_of_another_librarys_operators_may_take_memory_that_nobody_sees() -> None:
    parameters = weights()
    optimizer = bitsandbytes.optim.AdamW8bit(parameters)
    journal = journal_steps(optimizer)
    journal.measure_next_warm_step()
    for seed in range(2):
        set_gradients(parameters, seed)
        optimizer.step()
    assert journal.needed


def test_ranks_can_agree_after_the_closure_and_before_anything_changes() -> None:
    parameters = weights()
    optimizer = adamw(parameters)
    order = []

    def refuse() -> None:
        order.append("ready")
        raise RuntimeError("another rank has failed")

    def closure() -> Tensor:
        order.append("closure")
        set_gradients(parameters, seed=0)
        return torch.tensor(3.0)

    journal_steps(optimizer, ready=refuse)
    before = all_tensors(optimizer)
    with pytest.raises(RuntimeError, match="another rank"):
        optimizer.step(closure)
    assert order == ["closure", "ready"]
    assert_bits(all_tensors(optimizer), before)
    journal = journal_of(optimizer)
    assert journal is not None
    journal.undo()
    loss = optimizer.step(closure)
    assert isinstance(loss, Tensor)
    assert loss.item() == 3.0
    assert order == ["closure", "ready", "closure"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("compensation", [PLAIN, EXACT], ids=["plain", "exact"])
def test_schedulers_made_before_and_after_go_on_also_after_the_undo(
    when: str, compensation: dict[str, Any] | None
) -> None:
    results = []
    for journaled in (False, True):
        parameters, optimizer = made(OPTIMIZERS["AdamW-foreach"], SHAPES, compensation)
        scheduler = None
        if when == "before":
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        journal = journal_steps(optimizer, bundle_bytes=BUNDLE) if journaled else None
        scheduler = scheduler or torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for seed in range(4):
            if journal is not None and seed == 2:
                journal.undo()
                assert journal_of(optimizer) is None
            set_gradients(parameters, seed)
            optimizer.step()
            scheduler.step()
        results.append(everything(optimizer, []))
    assert_bits(*results)


@pytest.mark.parametrize("change", [journal_steps, compensate, release_gradients, offload_states])
@pytest.mark.filterwarnings("ignore::lightning_memkit.utilities.errors.NoEffectWarning")
def test_the_undo_of_an_optimizer_that_is_gone_does_nothing(change: Callable[[Optimizer], Any]) -> None:
    parameter = Parameter(torch.zeros(3, dtype=torch.bfloat16))
    handle = change(torch.optim.AdamW([parameter]))
    gc.collect()
    handle.undo()
    with pytest.raises(ReferenceError, match="is gone"):
        _ = handle.optimizer
    parameter.sum().backward()
    assert parameter.grad is not None


def test_the_undo_gives_the_step_back() -> None:
    optimizer = adamw(weights())
    journal_steps(optimizer).undo()
    assert "step" not in vars(optimizer)
    compensated = made(OPTIMIZERS["AdamW-single"], SHAPES, EXACT)[1]
    own = compensated.step
    journal_steps(compensated).undo()
    assert compensated.step is own


@pytest.mark.parametrize("infinite", [False, True])
@pytest.mark.parametrize("fused", [True, False])
def test_a_gradient_scaler_scales_and_skips_as_ever(fused: bool, infinite: bool) -> None:
    def run(faults: Faults, *, journaled: bool = True) -> list[Tensor]:
        parameters = weights()
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=fused)
        if journaled:  # the scaler's own allocations are not the step's
            journal_steps(optimizer, ready=faults.arm, bundle_bytes=BUNDLE)
        optimizer.register_step_post_hook(lambda *_: faults.disarm())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for seed in range(3):
            scaler.scale(torch.zeros(()))
            set_gradients(parameters, seed)
            if infinite and seed == 1:
                assert parameters[2].grad is not None
                parameters[2].grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
        return [*everything(optimizer, gradients_of(parameters)), torch.tensor(scaler.get_scale())]

    none = count_allocations(armed=False)
    with none:
        stock = run(none, journaled=False)
    for outcome in sweep(run, armed=False, points=lambda count: range(0, count, 4)):
        assert outcome.recovered, outcome.error
        assert_bits(outcome.result, stock)


class ClippingSGD(torch.optim.Optimizer):
    """Nobody's known class: steps by gradients over the norm of all, and counts its steps in an attribute."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1})
        self.steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in found]).norm()
        for parameter in found:
            self.state[parameter].setdefault("history", []).append(parameter.grad.mean())
            parameter.grad.div_(norm)  # in place, as some do
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.1 / self.steps)


@pytest.mark.parametrize("faulty_step", [COLD, WARM], ids=["cold", "warm"])
def test_an_optimizer_that_may_combine_parameters_is_stepped_whole(faulty_step: int) -> None:
    assert_every_fault_leaves_no_trace(ClippingSGD, SHAPES, PLAIN, faulty_step)


class NoisySGD(torch.optim.Optimizer):
    """Adds noise to its gradients, from a generator of its own."""

    def __init__(self, groups: Any, generator: Any) -> None:
        super().__init__(groups, {"lr": 0.1})
        self.generator = generator

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                draw = getattr(self.generator, "random", None) or self.generator.random_sample
                parameter.sub_(parameter.grad * (0.5 + float(draw())), alpha=group["lr"])


class Counter:
    """What it gives next it counts in something that is changed in place."""

    def __init__(self, counted: Any) -> None:
        self.counted = counted

    def random(self) -> float:
        self.counted[0] += 1
        return self.counted[0] / 100


class Drawn:
    """What it gives next comes from an iterator in a dictionary."""

    def __init__(self, numbers: Any) -> None:
        self.held = {"numbers": iter(numbers)}

    def random(self) -> float:
        return next(self.held["numbers"]) / 100


GENERATORS = {
    "an iterator in a dictionary": lambda seed: Drawn(range(seed, 100)),
    "a bytearray": lambda seed: Counter(bytearray([seed])),
    "an array of Python's": lambda seed: Counter(array("d", [seed])),
    "Python's": random.Random,
    "NumPy's": np.random.default_rng,
    "NumPy's of old": np.random.RandomState,
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_or_counter_of_the_optimizer_s_own_draws_once_a_step(kind: str) -> None:
    def build(groups: list[dict]) -> Optimizer:
        return NoisySGD(groups, GENERATORS[kind](3))

    assert_every_fault_leaves_no_trace(build, SHAPES, PLAIN, WARM)


def test_a_whole_step_that_can_not_be_made_leaves_everything_as_it_was() -> None:
    parameters = weights()
    optimizer = ClippingSGD(parameters)
    journal_steps(optimizer)
    for seed in range(2):
        set_gradients(parameters, seed)
        before = everything(optimizer, gradients_of(parameters))
        states = [(id(state), len(state["history"])) for state in optimizer.state.values()]
        with fail_at(8, repeat=True), pytest.raises(StepOutOfMemoryError, match="as a whole") as caught:
            optimizer.step()
        assert not caught.value.half_stepped
        assert_bits(everything(optimizer, gradients_of(parameters)), before)
        assert [(id(state), len(state["history"])) for state in optimizer.state.values()] == states
        assert optimizer.steps == seed
        optimizer.step()


def test_what_is_put_back_are_the_same_tensors() -> None:
    parameters = weights()
    optimizer = OPTIMIZERS["SGD"]([{"params": parameters}])
    journal = journal_steps(optimizer, bundle_bytes=BUNDLE)
    set_gradients(parameters, seed=0)
    optimizer.step()
    set_gradients(parameters, seed=1)

    def tensors() -> list[Any]:
        states = [optimizer.state[parameter]["momentum_buffer"] for parameter in parameters]
        return [
            *states,
            *(parameter.grad for parameter in parameters),
            *(optimizer.state[p] for p in parameters),
        ]

    before = tensors()
    places = [parameter.data_ptr() for parameter in parameters]
    with fail_at(3):
        optimizer.step()
    assert journal.recovered == 1
    assert all(new is old for new, old in zip(tensors(), before, strict=True))
    assert [parameter.data_ptr() for parameter in parameters] == places


class SharedCounter(torch.optim.SGD):
    """Keeps a count for all parameters under a key of its own, and steps by it."""

    def step(self, closure: Any = None) -> None:
        state: Any = self.state
        state["count"] = state.get("count", 0) + 1
        self.param_groups[0]["count"] = state["count"]
        super().step()


@pytest.mark.parametrize("faulty_step", [COLD, WARM], ids=["cold", "warm"])
def test_a_state_of_no_parameter_advances_once_a_step(faulty_step: int) -> None:
    def build(groups: list[dict]) -> Optimizer:
        return SharedCounter(groups, lr=0.1, momentum=0.9)

    assert_every_fault_leaves_no_trace(build, SHAPES, EXACT, faulty_step)


def test_overrides_of_bitsandbytes_hold_for_every_bundle() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layers = [torch.nn.Linear(64, 80, bias=False) for _ in range(2)]
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    before = list(manager.module_weight_config_triple)
    manager.register_module_override(layers[1], "weight", {"optim_bits": 32})
    try:
        parameters = [layer.weight for layer in layers]
        optimizer = bitsandbytes.optim.AdamW8bit(parameters)
        journal_steps(optimizer, bundle_bytes=1)
        set_gradients(parameters, seed=0)
        optimizer.step()
        kinds = [optimizer.state[parameter]["state1"].dtype for parameter in parameters]
        assert kinds == [torch.uint8, torch.float32]
    finally:
        manager.module_weight_config_triple = before
        manager.index2config.clear()
        manager.pid2config.clear()


def test_other_errors_pass_unchanged() -> None:
    parameters = weights()
    optimizer = adamw(parameters)
    journal_steps(optimizer)
    set_gradients(parameters, seed=0)
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()


def test_what_can_not_be_journaled_is_refused() -> None:
    parameters = weights()
    with pytest.raises(ValueError, match="bundle_bytes=0"):
        journal_steps(adamw(parameters), bundle_bytes=0)
    optimizer = adamw(parameters)
    journal_steps(optimizer)
    with pytest.raises(ValueError, match="journaled already"):
        journal_steps(optimizer)
    released = adamw(weights())
    release_gradients(released)
    with pytest.raises(ValueError, match="released"):
        journal_steps(released)


def test_a_change_of_the_step_after_the_journal_is_refused_before_it_steps() -> None:
    parameters, optimizer = made(OPTIMIZERS["AdamW-single"], SHAPES, EXACT)
    handle = compensation_of(optimizer)
    assert handle is not None
    journal_steps(optimizer)
    handle.undo()
    set_gradients(parameters, seed=0)
    with pytest.raises(RuntimeError, match="after it was journaled"):
        optimizer.step()


class SteppingCounter(torch.optim.SGD):
    """Counts its steps in its group, and takes memory after that."""

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        torch.zeros(1)
        super().step()


def test_a_step_without_gradients_counts_once() -> None:
    _, optimizer = made(lambda groups: SteppingCounter(groups, lr=0.1), SHAPES, EXACT)
    journal = journal_steps(optimizer)
    with fail_at(0):
        optimizer.step()
    assert journal.recovered == 1
    assert optimizer.param_groups[0]["count"] == 1


@pytest.mark.parametrize("whole", [False, True])
def test_a_step_that_failed_for_good_draws_the_same_rounding_noise_when_it_is_repeated(whole: bool) -> None:
    results = []
    for fails in (False, True):
        build = of_another_package("prodigyopt.Prodigy") if whole else OPTIMIZERS["NAdam"]
        parameters, optimizer = made(build, SHAPES, STOCHASTIC)
        journal_steps(optimizer)
        for seed in range(2):
            set_gradients(parameters, seed)
            if fails:
                with fail_at(4, repeat=True), pytest.raises(StepOutOfMemoryError, match="as before the step"):
                    optimizer.step()
            optimizer.step()
        results.append(everything(optimizer, []))
    assert_bits(*results)

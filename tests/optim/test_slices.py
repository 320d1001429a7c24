# pyright: reportArgumentType=false
"""A parameter that is larger than a bundle is stepped in slices: the bits of the optimizer's own step, few copies."""

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_memkit.memory.meter import ByteMeter
from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.journal import journal_steps
from lightning_memkit.optim.journaled_step import StepOutOfMemoryError
from lightning_memkit.optim.offload import offload_states
from lightning_memkit.optim.slices import SlicedParameter, _Runs
from lightning_memkit.testing import Faults, byte_budget, count_allocations, fail_at, sweep
from tests.optim import test_third_party as third_party

Build = Callable[[list], Optimizer]
LARGE, SMALL = (41, 53), (7,)
BUNDLE = 8000

COMMON: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 1e-3},
    "AdamW": {"lr": 1e-3},
    "Adamax": {"lr": 1e-3},
    "NAdam": {"lr": 1e-3},
    "RAdam": {"lr": 1e-3},
    "RMSprop": {"lr": 1e-3, "momentum": 0.9, "centered": True},
    "Adagrad": {"lr": 1e-2, "lr_decay": 0.1},
    "Adadelta": {"lr": 1.0},
    "Rprop": {"lr": 1e-3},
    "ASGD": {"lr": 1e-3, "t0": 2},  # averages from its second step on
    "SGD": {"lr": 1e-2, "momentum": 0.9},
}
VARIANTS: list[dict[str, Any]] = [{}, {"weight_decay": 0.1}, {"maximize": True}]
MORE: dict[str, list[dict[str, Any]]] = {
    "Adam": [{"amsgrad": True}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "AdamW": [{"amsgrad": True}, {"weight_decay": 0.1, "maximize": True}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RMSprop": [{"momentum": 0.0, "centered": False}],
    "SGD": [{"momentum": 0.0}, {"nesterov": True}, {"dampening": 0.5}],
}
FUSED = ("Adam", "AdamW", "Adagrad", "SGD")
ELSEWHERE: dict[str, dict[str, Any]] = {
    "lion_pytorch.Lion": {"lr": 1e-4, "weight_decay": 0.1},
    "optimi.Adam": {"lr": 1e-3},
    "optimi.AdamW": {"lr": 1e-3, "weight_decay": 0.1},
    "optimi.Adan": {"lr": 1e-3},
    "optimi.Lion": {"lr": 1e-4, "weight_decay": 0.1},
    "optimi.RAdam": {"lr": 1e-3},
    "optimi.Ranger": {"lr": 1e-3},
    "optimi.SGD": {"lr": 1e-2, "momentum": 0.9},
    "schedulefree.AdamWScheduleFree": {"lr": 1e-3, "weight_decay": 0.1, "warmup_steps": 3},
    "schedulefree.RAdamScheduleFree": {"lr": 1e-3},
    "schedulefree.SGDScheduleFree": {"lr": 1e-2, "weight_decay": 0.1},
}


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, options in COMMON.items():
        for more in [*VARIANTS, *MORE.get(name, [])]:
            if name == "Rprop" and "weight_decay" in more:
                continue
            for how in [{"foreach": False}, {"foreach": True}, *([{"fused": True}] if name in FUSED else [])]:
                yield name, {**options, **more, **how}


def named(case: Any) -> str | None:
    return "-".join(f"{key}={value}" for key, value in case.items()) if isinstance(case, dict) else None


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The elements of each slice that was shown to an optimizer."""
    shown: list[int] = []
    show = SlicedParameter.show

    def counted(self: SlicedParameter, most_bytes: int) -> Any:
        slot = show(self, most_bytes)
        shown.append(slot.parameter.numel())
        return slot

    monkeypatch.setattr(SlicedParameter, "show", counted)
    return shown


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def weights(shapes: Any = (SMALL, LARGE, SMALL), dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(parameters: list[Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def left_by(optimizer: Optimizer, parameters: list[Parameter]) -> list[Any]:
    """All that steps leave behind, in its order."""
    found: list[Any] = [[key for key in optimizer.state] == [p for p in parameters if p in optimizer.state]]
    for group in optimizer.param_groups:
        found.append([(key, value) for key, value in group.items() if key != "params"])
    for parameter in parameters:
        found += [parameter.detach(), parameter.grad, list(optimizer.state.get(parameter, {}))]
        found += list(optimizer.state.get(parameter, {}).values())
    return found


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        if isinstance(their, Tensor):
            assert (our.dtype, our.shape, our.stride()) == (their.dtype, their.shape, their.stride())
            assert torch.equal(our.view(-1).view(torch.uint8), their.view(-1).view(torch.uint8))
        else:
            assert str(our) == str(their)


def trained(
    build: Build,
    parameters: list[Parameter],
    *,
    steps: int = 3,
    bundle_bytes: int | None = BUNDLE,
    compensation: dict[str, Any] | None = None,
) -> list[Any]:
    optimizer = build([{"params": parameters[:2]}, {"params": parameters[2:]}])
    if compensation is not None:
        compensate(optimizer, **compensation)
    if bundle_bytes is not None:
        journal_steps(optimizer, bundle_bytes=bundle_bytes)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for seed in range(steps):
        set_gradients(parameters, seed)
        optimizer.step()
        scheduler.step()
    return left_by(optimizer, parameters)


@pytest.mark.parametrize(("name", "options"), [*cases()], ids=named)
def test_slices_are_bitwise_the_whole_step(name: str, options: dict[str, Any], slices: list[int]) -> None:
    def build(groups: list) -> Optimizer:
        return getattr(torch.optim, name)(groups, **options)

    # torch 2.13's fused SGD reads memory that it has not written yet where it keeps a 16-bit momentum.
    unrepeatable = name == "SGD" and options.get("fused") and options["momentum"]
    for dtype in (torch.float32,) if unrepeatable else (torch.float32, torch.bfloat16):
        slices.clear()
        theirs = trained(build, weights(dtype=dtype), bundle_bytes=None)
        assert not slices
        assert_same(trained(build, weights(dtype=dtype)), theirs)
        assert len(slices) >= 6
        assert sum(slices) == 3 * 41 * 53


@pytest.mark.parametrize(("name", "options"), ELSEWHERE.items())
def test_slices_of_another_package_are_bitwise_the_whole_step(
    name: str, options: dict[str, Any], slices: list[int]
) -> None:
    make = third_party.optimizer_class(name)

    def build(groups: list) -> Optimizer:
        return third_party.prepared(make(groups, **options))

    for dtype in (torch.float32, torch.bfloat16):
        slices.clear()
        theirs = trained(build, weights(dtype=dtype), bundle_bytes=None, steps=6)
        assert_same(trained(build, weights(dtype=dtype), steps=6), theirs)
        assert sum(slices) == 6 * 41 * 53


@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_a_learning_rate_that_is_a_tensor_is_the_same_for_all_slices(how: str, slices: list[int]) -> None:
    def build(groups: list) -> Optimizer:
        return torch.optim.AdamW(groups, lr=torch.tensor(1e-3), **{how: how == "fused"})

    assert_same(trained(build, weights()), trained(build, weights(), bundle_bytes=None))
    assert slices


@pytest.mark.parametrize(
    ("name", "dtype", "how"),
    [
        (
            "RMSprop",
            torch.bfloat16,
            "foreach",
        ),  # 199950 elements: the share of one of two threads ends within a vector
        ("AdamW", torch.float32, "foreach"),
        ("AdamW", torch.float32, "fused"),
        ("Adagrad", torch.bfloat16, "fused"),
    ],
)
def test_slices_are_bitwise_the_whole_step_of_several_threads(
    name: str, dtype: torch.dtype, how: str, two_threads: None, slices: list[int]
) -> None:
    def build(groups: list) -> Optimizer:
        return getattr(torch.optim, name)(groups, **{**COMMON[name], how: how == "fused"})

    def parameters() -> list[Parameter]:
        return weights(((66667, 3), SMALL), dtype)

    theirs = trained(build, parameters(), bundle_bytes=None)
    for bundle_bytes in (1 << 20, 150_000):
        slices.clear()
        assert_same(trained(build, parameters(), bundle_bytes=bundle_bytes), theirs)
        assert slices


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("at_once", [None, 1 << 17])
@pytest.mark.parametrize("count", [64, 5000, 200_003, 1 << 20, 1_234_567])
def test_slices_end_where_vectors_or_the_whole_loops_do(
    count: int, at_once: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    whole_ends = set()
    for first in range(0, count, at_once or count):
        whole_ends |= ends_of_threads(first, min(count, first + (at_once or count)), threads)
    for most in (1, 3000, 40_000, 500_000):
        runs, start, seen = _Runs(count, at_once, by_threads=True), 0, set()
        while start < count:
            stop = runs.stop_of_slice(start, most)
            assert start < stop <= start + max(most, 64)
            for end in ends_of_threads(start, stop, threads):
                first_of_loop = max(end_before for end_before in {0, *whole_ends} if end_before < end)
                assert end in whole_ends or (end - first_of_loop) % 64 == 0, (start, stop)
            seen |= ends_of_threads(start, stop, threads)
            start = stop
        # Where the whole loop leaves elements over behind its last vector, a slice does, too.
        within_vectors = {end for end in whole_ends if end % 64}
        assert within_vectors <= seen


def ends_of_threads(start: int, stop: int, threads: int) -> set[int]:
    """Where at::parallel_for ends the loops of its threads (aten/src/ATen/ParallelOpenMP.h)."""
    count = stop - start
    share = -(-count // min(threads, -(-count // 32768)))
    return {min(stop, end) for end in range(start + share, stop + share, share)}


def sgd(groups: list, **options: Any) -> Optimizer:
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9, foreach=False, **options)


def adamw(groups: list, **options: Any) -> Optimizer:
    return torch.optim.AdamW(groups, lr=1e-3, **{"foreach": False, **options})


class Subclass(torch.optim.AdamW):
    """Its step may mean something else."""


class OfRows(torch.optim.Optimizer):
    """Steps rows by their norms: not element by element."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad / parameter.grad.norm(dim=-1, keepdim=True), alpha=group["lr"])


@pytest.mark.parametrize(
    "build",
    [
        Subclass,
        OfRows,
        lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
        lambda groups: with_own_step(adamw(groups)),
        lambda groups: offloaded(adamw(groups)),
    ],
    ids=["subclass", "unknown", "of a whole parameter", "own step", "offloaded"],
)
def test_optimizers_not_known_to_go_by_element_are_shown_whole_parameters(
    build: Build, slices: list[int]
) -> None:
    assert_same(trained(build, weights()), trained(build, weights(), bundle_bytes=None))
    assert not slices


def with_own_step(optimizer: Any) -> Optimizer:
    own = optimizer.step
    optimizer.step = MethodType(lambda _, closure=None: own(closure), optimizer)
    return optimizer


def offloaded(optimizer: Optimizer) -> Optimizer:
    with pytest.warns(match="."):  # there is no other device here
        offload_states(optimizer)
    return optimizer


def transposed() -> Parameter:
    return Parameter(torch.randn(LARGE).t())


def last_channels() -> Parameter:
    return Parameter(torch.randn(10, 8, 5, 5).to(memory_format=torch.channels_last))


@pytest.mark.parametrize(
    "make",
    [transposed, last_channels, lambda: Parameter(torch.randn(LARGE, dtype=torch.complex64))],
    ids=["transposed", "channels last", "complex"],
)
def test_parameters_that_are_no_plain_run_of_numbers_are_stepped_whole(
    make: Callable[[], Parameter], slices: list[int]
) -> None:
    results = []
    for bundle_bytes in (None, BUNDLE):
        torch.manual_seed(0)
        parameter = make()
        optimizer = adamw([parameter])
        if bundle_bytes:
            journal_steps(optimizer, bundle_bytes=bundle_bytes)
        for _ in range(2):
            parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        results.append([parameter.detach().contiguous().view(-1), *optimizer.state[parameter].values()])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert not slices


@pytest.mark.parametrize("kind", ["transposed", "sparse"])
def test_gradients_that_lie_otherwise_than_the_parameter_are_stepped_whole(
    kind: str, slices: list[int]
) -> None:
    results = []
    for bundle_bytes in (None, BUNDLE):
        parameter = Parameter(torch.ones(LARGE))
        optimizer = torch.optim.SGD([parameter], lr=1e-2)
        if bundle_bytes:
            journal_steps(optimizer, bundle_bytes=bundle_bytes)
        gradient = torch.arange(41 * 53.0).view(53, 41).t()
        parameter.grad = gradient.to_sparse() if kind == "sparse" else gradient
        optimizer.step()
        results.append(parameter.detach())
    assert torch.equal(*results)
    assert not slices


def test_capturable_steps_are_whole(slices: list[int]) -> None:
    parameters = weights([LARGE])
    optimizer = torch.optim.AdamW(parameters, capturable=True)
    journal_steps(optimizer, bundle_bytes=BUNDLE)
    set_gradients(parameters, seed=0)
    with pytest.raises(AssertionError, match="capturable"):  # torch's own: not on a CPU
        optimizer.step()
    assert not slices


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("build", [adamw, sgd, lambda groups: torch.optim.NAdam(groups)])
@pytest.mark.parametrize(
    "compensation",
    [
        {"mode": "split", "states": "exact"},
        {"mode": "none", "states": "exact"},
        {"mode": "kahan", "states": "compact"},
        {"mode": "stochastic", "states": "exact"},
        {"mode": "stochastic", "states": "compact"},
        {"mode": "split", "states": "compact"},
    ],
    ids=lambda compensation: compensation["mode"],
)
def test_compensated_steps_are_bitwise_the_same(
    compensation: dict[str, Any],
    build: Build,
    grad_dtype: torch.dtype,
    slices: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightning_memkit.optim.pieces.PIECE_ELEMENTS_CPU", 512)  # the engine's own
    results = []
    for bundle_bytes in (None, BUNDLE):
        parameters = weights(dtype=torch.bfloat16)
        for parameter in parameters:
            parameter.grad_dtype = grad_dtype
        optimizer = build(parameters)
        compensate(optimizer, **compensation)
        if bundle_bytes:
            journal_steps(optimizer, bundle_bytes=bundle_bytes)
        for seed in range(3):
            for parameter in parameters:
                generator = torch.Generator().manual_seed(seed)
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(grad_dtype)
            optimizer.step()
        results.append(left_by(optimizer, parameters))
    assert_same(*results)
    assert slices


def test_what_is_stepped_in_slices_keeps_its_tensors(slices: list[int]) -> None:
    parameters = weights([LARGE])
    optimizer = adamw(parameters)
    journal_steps(optimizer, bundle_bytes=BUNDLE)
    set_gradients(parameters, seed=0)
    optimizer.step()
    state, version = optimizer.state[parameters[0]], parameters[0]._version
    before = [state, *state.values(), parameters[0].grad]
    optimizer.step()
    after = [optimizer.state[parameters[0]], *state.values(), parameters[0].grad]
    assert all(new is old for new, old in zip(after, before, strict=True))
    assert list(optimizer.state) == parameters
    assert parameters[0]._version > version  # autograd is to notice
    assert len(slices) > 2


COLD, WARM = 0, 2


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("faulty_step", [COLD, WARM], ids=["cold", "warm"])
@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in ("AdamW", "SGD") for how in ("for-loop", "foreach", "fused", "split")]
    + [("NAdam", "for-loop"), ("ASGD", "foreach"), ("AdamW", "kahan"), ("NAdam", "kahan")],
)
def test_every_fault_within_slices_leaves_no_trace(
    name: str, how: str, faulty_step: int, every: int, slices: list[int]
) -> None:

    def build(groups: list) -> Optimizer:
        fused = {"fused": True} if how == "fused" else {"foreach": how == "foreach"}
        return getattr(torch.optim, name)(groups, **COMMON[name], **fused)

    def run(faults: Faults, bundle_bytes: int | None = BUNDLE) -> list[Any]:
        parameters = weights(dtype=torch.bfloat16 if how in ("split", "kahan") else torch.float32)
        optimizer = build(parameters)
        if how in ("split", "kahan"):
            compensate(optimizer, mode=how, states="exact" if how == "split" else "compact")
        journal = None if bundle_bytes is None else journal_steps(optimizer, bundle_bytes=bundle_bytes)
        for step in range(4):
            set_gradients(parameters, seed=step)
            if step == faulty_step:
                faults.arm()
            optimizer.step()
            faults.disarm()
        assert journal is None or journal.recovered == (faults.fault is not None)
        return left_by(optimizer, parameters)

    with count_allocations(armed=False) as none:
        theirs = run(none, bundle_bytes=None)
    points = 0
    for outcome in sweep(run, armed=False, points=lambda count: range(0, count, every)):
        assert outcome.recovered, (outcome.fault, outcome.error)
        assert outcome.result is not None
        assert_same(outcome.result, theirs)
        assert outcome.leaked_bytes == 0
        points += 1
    assert points > 5 // every
    assert len(slices) > 4 * points


@pytest.mark.parametrize("how", ["foreach", "fused"])
@pytest.mark.parametrize("bundle_bytes", [8000, 20_000])
def test_copies_are_never_more_than_a_bundle(how: str, bundle_bytes: int, slices: list[int]) -> None:
    parameters = weights([(101, 53)])
    optimizer = torch.optim.AdamW(parameters, **{how: how == "fused"})
    journal_steps(optimizer, bundle_bytes=bundle_bytes)
    for seed in range(3):
        set_gradients(parameters, seed)
        slices.clear()
        states = [value for state in optimizer.state.values() for value in state.values()]
        with ByteMeter() as meter:
            meter.track([*parameters, *(parameter.grad for parameter in parameters), *states])
            before = meter.live_bytes
            optimizer.step()
            made = meter.live_bytes - before  # states, in the first step
        # Of 16 bytes an element (8 in the first step) a for-loop's temporaries take 8 beside the copies' 12 (4, and
        # the slices of the states 8). Counters and what belongs to groups are copied besides.
        most = {"fused": 1, "foreach": 20 / 16}[how] if seed else {"fused": 2, "foreach": 20 / 8}[how]
        assert meter.peak_bytes - before - made <= most * bundle_bytes + 1000
        assert meter.peak_bytes - before - made > bundle_bytes // 3
        assert 0 <= bundle_bytes - max(slices) * (16 if seed else 8) < 64 * 16


def test_slices_become_smaller_until_they_fit(slices: list[int]) -> None:
    def run(budget: int | None) -> list[Any]:
        parameters = weights([(512, 1024)])
        optimizer = adamw(parameters)
        journal = journal_steps(optimizer, bundle_bytes=3 << 20)
        set_gradients(parameters, seed=0)
        optimizer.step()
        slices.clear()
        held = [*parameters, parameters[0].grad, *optimizer.state[parameters[0]].values()]
        if budget is None:
            optimizer.step()
        else:
            with byte_budget(8 * 1024 * 1024 + budget, resident=held):
                optimizer.step()
            assert journal.recovered > 0
        return left_by(optimizer, parameters)

    expected = run(None)
    assert max(slices) == (3 << 20) // 16
    assert_same(run(2 << 20), expected)
    assert slices[-2] == (3 << 19) // 16
    with pytest.raises(StepOutOfMemoryError, match="elements from element 0 of parameter 0") as caught:
        run(100_000)
    assert not caught.value.half_stepped
    assert slices[-1] * 16 >= (1 << 20) // 2  # smaller ones are not worth their launches


def test_a_parameter_that_fits_a_bundle_is_sliced_where_it_fails(slices: list[int]) -> None:
    results = []
    for faulty in (False, True):
        parameters = weights([(512, 1024)])
        optimizer = adamw(parameters)
        journal_steps(optimizer, bundle_bytes=32 << 20)
        for seed in range(2):
            set_gradients(parameters, seed)
            assert not slices
            with fail_at(1) if faulty and seed else count_allocations():
                optimizer.step()
        results.append(left_by(optimizer, parameters))
    assert_same(*results)
    assert slices == [(4 << 20) // 16] * 2


@pytest.mark.parametrize("fault", [3, 14])
def test_a_step_that_fails_within_a_parameter_says_so(fault: int) -> None:
    parameters = weights([LARGE, SMALL])
    optimizer = adamw(parameters)
    journal_steps(optimizer, bundle_bytes=BUNDLE)
    set_gradients(parameters, seed=0)
    optimizer.step()
    before = [
        value.clone() if isinstance(value, Tensor) else value for value in left_by(optimizer, parameters)
    ]
    half = fault > 3
    message = "0 of 2 parameters have been stepped, one in part" if half else "as before the step"
    with fail_at(fault, repeat=True), pytest.raises(StepOutOfMemoryError, match=message) as caught:
        optimizer.step()
    assert caught.value.half_stepped is half
    assert list(optimizer.state) == parameters  # no slice is left there
    if not half:
        assert_same(left_by(optimizer, parameters), before)


def test_other_errors_within_a_slice_pass_and_leave_no_slice_behind() -> None:
    parameters = weights([LARGE])
    optimizer = adamw(parameters)
    journal_steps(optimizer, bundle_bytes=BUNDLE)
    set_gradients(parameters, seed=0)
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    assert not optimizer.state

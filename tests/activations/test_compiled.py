# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""`compile:x`: bitwise what torch compiles with that budget, and held to the peak. The oracle is torch's compile."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch._functorch import config
from torch.utils.flop_counter import FlopCounterMode

from lightning_memkit import NoEffectWarning, checkpoint_modules
from lightning_memkit.activations import compiled as module_under_test
from lightning_memkit.activations.compiled_peak import (
    BlockBytes,
    can_measure,
    choose_budget,
    measure_block,
    peak_of_row,
)
from lightning_memkit.memory.allocator_trace import AllocatorTrace
from lightning_memkit.memory.meter import ByteMeter
from tests.activations.models import VOCABULARY, ConvNet, Stack

pytestmark = [  # torch's compiler itself
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]


def partitioned(graph: Any, inputs: Any, budget: float) -> Any:
    """torch's partitioner with a budget, without Inductor's kernels: quick to compile."""
    with config.patch(activation_memory_budget=budget):
        return aot_eager_decomp_partition(graph, inputs)


def inductor(graph: Any, inputs: Any, budget: float) -> Any:
    """What `compile:x` really uses."""
    from torch._inductor.compile_fx import compile_fx

    with config.patch(activation_memory_budget=budget):
        return compile_fx(graph, inputs)


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Nothing compiled stays for the next test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The quick compiler in place of Inductor; the budgets that were compiled."""
    budgets: list[float] = []

    def compile_and_note(graph: Any, inputs: Any, budget: float) -> Any:
        budgets.append(budget)
        return partitioned(graph, inputs, budget)

    monkeypatch.setattr(module_under_test, "_compile", compile_and_note)
    return budgets


def as_torch_compiles(model: nn.Module, budget: float, compiler: Callable[..., Any] = partitioned) -> None:
    """The oracle: each block compiled with the budget, nothing measured."""
    for block in model.modules():
        if type(block).__name__ in ("Block", "ConvBlock", "Writing"):
            block.forward = torch.compile(
                block.forward, backend=lambda graph, inputs: compiler(graph, inputs, budget)
            )


def ids(rows: int = 4, length: int = 32) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def images() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Writing(nn.Module):
    """Writes to its input, to a buffer and to an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("level", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.level.mul_(0.9).add_(x.mean(0))
        return self.layer(torch.tanh(x.relu_()).exp()).sigmoid() * x


def writing() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), *(Writing() for _ in range(3)))


CASES = {
    "dropout": (lambda: Stack(width=64), ids, False),
    "batchnorm": (ConvNet, images, False),
    "autocast": (lambda: Stack(width=64), ids, True),
    "writes": (writing, lambda: torch.randn(8, 3, generator=torch.Generator().manual_seed(1)), False),
}


def train(model: nn.Module, batch: Tensor, autocast: bool, steps: int = 2) -> list[Tensor]:
    """Losses, gradients that add up over the steps, buffers, the random state, and the calls of weights' hooks."""
    calls: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: calls.append(name))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(f"{name} added"))
    torch.manual_seed(3)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(batch).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    counts = torch.tensor([calls.count(name) for name in sorted(set(calls))])
    return [*losses, *gradients, *model.buffers(), torch.get_rng_state(), counts]


def assert_trains_as(case: str, budget: float, compiler: Callable[..., Any]) -> None:
    build, batch, autocast = CASES[case]
    plain = build().train()
    ours = copy.deepcopy(plain)
    as_torch_compiles(plain, budget, compiler)
    expected = train(plain, batch(), autocast)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoEffectWarning)
        checkpoint_modules(ours, f"compile:{budget}", blocks=["Block", "ConvBlock", "Writing"])
        found = train(ours, batch(), autocast)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.fixture
def always_asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[float, float]]:
    """All is measured as ever, and the asked budget is used whatever comes out; what was measured."""
    seen: list[dict[float, float]] = []

    def choose(asked: float, peak_of: Any) -> Any:
        verdict = choose_budget(asked, peak_of)
        assert verdict is not None
        seen.append(verdict.peaks)
        return type(verdict)(asked=asked, used=asked, peaks=verdict.peaks)

    monkeypatch.setattr(module_under_test, "choose_budget", choose)
    return seen


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.long
def test_measuring_changes_no_bit_of_the_training(
    case: str, compiled: list[float], always_asked: list[dict[float, float]]
) -> None:
    assert_trains_as(case, 0.3, partitioned)
    assert len(always_asked) == 1  # it was measured, and once for all blocks
    assert all(peak > 0 for peak in always_asked[0].values())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_measuring_changes_no_bit_of_what_inductor_makes(
    case: str, always_asked: list[dict[float, float]]
) -> None:
    assert_trains_as(case, 0.3, inductor)
    assert always_asked


# --- what is compiled, and what is said ----------------------------------------------------------------------------


def test_a_bound_that_lowers_the_peak_costs_one_compilation_and_says_nothing(compiled: list[float]) -> None:
    model = Stack(width=64, depth=4).train()
    checkpoint_modules(model, "compile:0.5")
    for _ in range(2):
        model(ids()).sum().backward()
    assert compiled == [0.5, 1.0]
    model(ids(8)).sum().backward()  # other shapes are not measured again
    assert compiled == [0.5, 1.0, 0.5]


def test_no_bound_asked_for_measures_nothing(compiled: list[float]) -> None:
    model = Stack(depth=1).train()
    checkpoint_modules(model, "compile:1", blocks=["Block"])
    model(ids()).sum().backward()
    assert compiled == [1.0]


def test_a_bound_that_lowers_nothing_gives_way_to_one_that_does(compiled: list[float]) -> None:
    model = Stack(width=64, depth=1).train()  # all saved bytes of one block are made again at once
    checkpoint_modules(model, "compile:0", blocks=["Block"])
    said = r'"compile:0" does not lower the peak of 1 x Block .* KiB at 0, .* bound\); "compile:0.5" is used, write'
    with pytest.warns(UserWarning, match=said):
        model(ids()).sum().backward()
    assert compiled == [0.0, 1.0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize(
    ("peaks", "used", "category", "said"),
    [
        ({0.1: 1000, 1.0: 990, 0.25: 970, 0.5: 800, 0.75: 900}, 0.5, UserWarning, '0.5" is used, write that'),
        (
            {0.1: 1000, 1.0: 990, 0.25: 990, 0.5: 991, 0.75: 992},
            1.0,
            NoEffectWarning,
            'budget; "compile:1" is used',
        ),
        (
            {0.1: 989, 1.0: 990, 0.25: 989, 0.5: 990, 0.75: 992},
            0.1,
            NoEffectWarning,
            'budget; "compile:0.1" is used',
        ),
    ],
)
@pytest.mark.long
def test_what_is_chosen_is_said_once_and_runs_from_the_first_forward_on(
    compiled: list[float],
    monkeypatch: pytest.MonkeyPatch,
    peaks: dict[float, int],
    used: float,
    category: type[Warning],
    said: str,
) -> None:
    monkeypatch.setattr(module_under_test, "peak_of_row", lambda *_: peaks[compiled[-1]])
    ran: list[float] = []
    compile_and_note = module_under_test._compile

    def noting_runs(graph: Any, inputs: Any, budget: float) -> Any:
        run = compile_and_note(graph, inputs, budget)

        def noted(*values: Any) -> Any:
            ran.append(budget)
            return run(*values)

        return noted

    monkeypatch.setattr(module_under_test, "_compile", noting_runs)
    model = Stack(depth=2).train()
    checkpoint_modules(model, "compile:0.1")
    with pytest.warns(category, match=said):
        model(ids()).sum().backward()
    model(ids(8)).sum().backward()  # of other shapes: compiled anew, with the same budget
    assert ran == [used] * 4
    assert compiled == [0.1, 1.0, 0.25, 0.5, 0.75, used]


class Broken(nn.Module):
    """A forward of two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).exp()
        torch._dynamo.graph_break()
        return self.second(x).exp()


def test_every_graph_of_a_forward_is_measured_and_one_warning_is_enough(
    compiled: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_under_test, "peak_of_row", lambda *_: 100)
    model = nn.Sequential(nn.Linear(4, 16), Broken(), Broken()).train()
    checkpoint_modules(model, "compile:0.6", blocks=["Broken"])
    with pytest.warns(NoEffectWarning, match="of 2 x Broken") as said:
        model(torch.randn(3, 4)).sum().backward()
    assert compiled == [0.6, 1.0, 0.75] * 2
    assert len([one for one in said if one.category is NoEffectWarning]) == 1


def test_shapes_that_are_dynamic_from_the_start_are_not_measured(compiled: list[float]) -> None:
    model = Stack(width=64, depth=2).train()
    checkpoint_modules(model, "compile:0.3")
    with torch._dynamo.config.patch(assume_static_by_default=False):
        for rows in (4, 6):
            model(ids(rows)).sum().backward()
    assert set(compiled) == {0.3}


def test_a_step_under_a_profiler_is_measured_later(compiled: list[float]) -> None:
    model = Stack(width=64, depth=2).train()
    checkpoint_modules(model, "compile:0.3")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        model(ids()).sum().backward()
    assert compiled == [0.3]
    model(ids()).sum().backward()
    assert compiled == [0.3, 1.0]


def test_a_reducer_of_gradients_hears_of_the_training_only(compiled: list[float]) -> None:
    buckets: list[int] = []

    def count(state: None, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
        buckets.append(bucket.index())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        inner = Stack(width=64, depth=4, dropout=0.0).train()
        checkpoint_modules(inner, "compile:0.3")
        model = nn.parallel.DistributedDataParallel(inner)
        model.register_comm_hook(None, count)
        model(ids()).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert compiled == [0.3, 1.0]
    assert buckets == [0]


# --- the choice ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "peaks", "used", "helps"),
    [
        (0.5, {0.5: 90, 1.0: 100}, 0.5, True),
        (0.5, {0.5: 99, 1.0: 100, 0.75: 98}, 0.75, True),
        (0.5, {0.5: 99, 1.0: 100, 0.75: 99}, 0.5, False),
        (0.5, {0.5: 101, 1.0: 100, 0.75: 99}, 1.0, False),
        (0.0, {0.0: 120, 1.0: 100, 0.25: 95, 0.5: 90, 0.75: 97}, 0.5, True),
        (0.5, {0.5: 100, 1.0: math.inf}, 0.5, True),
        (0.5, {0.5: math.inf, 1.0: math.inf}, 0.5, True),
    ],
)
def test_choice(asked: float, peaks: dict[float, float], used: float, helps: bool) -> None:
    verdict = choose_budget(asked, peaks.__getitem__)
    assert verdict is not None
    assert (verdict.used, verdict.helps) == (used, helps)
    assert verdict.peaks == peaks  # as many as decide were measured, no more


def test_nothing_to_bound_is_no_verdict() -> None:
    assert choose_budget(0.5, lambda _: None) is None


def test_peak_of_a_row_counts_saved_bytes_of_all_and_the_backward_of_one() -> None:
    assert BlockBytes(saved_bytes=10, peak_bytes=14).peak_of(1) == 14
    assert BlockBytes(saved_bytes=10, peak_bytes=14).peak_of(5) == 54


# --- the measurement -----------------------------------------------------------------------------------------------


def two_products(x: Tensor, weight: Tensor) -> tuple[Tensor]:
    return ((x @ weight).exp().sin(),)


def test_saved_bytes_and_peak_are_those_of_the_operators() -> None:
    x, weight = torch.randn(64, 32), torch.randn(32, 32, requires_grad=True)
    found = measure_block(two_products, (x, weight))
    with ByteMeter() as meter:
        (out,) = two_products(x, weight)
        saved = meter.live_bytes
        torch.autograd.grad(out, weight, torch.ones_like(out))
    assert found is not None
    assert found.saved_bytes == saved == 2 * x.nbytes  # of exp and of sin
    assert found.peak_bytes == meter.peak_bytes


def test_what_has_no_backward_is_not_measured() -> None:
    assert measure_block(lambda x: (x.detach().exp(),), (torch.ones(4, requires_grad=True),)) is None


def test_a_run_that_does_not_fit_has_no_finite_peak() -> None:
    def too_large(x: Tensor) -> tuple[Tensor]:
        raise torch.OutOfMemoryError

    assert peak_of_row(too_large, (torch.ones(4, requires_grad=True),), 3) == math.inf


def test_inputs_are_copied_with_their_strides_and_aliases() -> None:
    base = torch.randn(4, 6)
    made = torch.ones(4, 6, requires_grad=True) * 2
    weight = nn.Parameter(torch.randn(6))
    inputs = (base[:, 1:4], base, torch.ones(1, 6).expand(4, 6), made, weight, 3)
    before = [value.detach().clone() for value in inputs if isinstance(value, Tensor)]

    def writes(window: Tensor, whole: Tensor, wide: Tensor, made: Tensor, weight: Tensor, number: int):
        copies = (window, whole, wide, made, weight)
        for copied, value in zip(copies, inputs, strict=False):
            assert isinstance(value, Tensor)
            assert torch.equal(copied, value)
            assert (copied.stride(), copied.is_leaf) == (value.stride(), value.is_leaf)
            assert copied.requires_grad == value.requires_grad
            assert copied.data_ptr() != value.data_ptr()
        window.zero_()
        assert not whole[:, 1:4].any()
        made.mul_(2)
        with torch.no_grad():
            weight.zero_()
        return (made * weight * number,)

    assert measure_block(writes, inputs) is not None
    for value, old in zip(inputs, before, strict=False):
        assert torch.equal(value, old)
    assert weight.grad is None


class Sharded(Tensor):
    """Stands for other tensors, as a DTensor does."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_what_can_be_measured() -> None:
    x, weight = torch.ones(4), nn.Parameter(torch.ones(4))
    assert can_measure((x, weight))
    assert not can_measure((x, 3))  # nothing wants a gradient
    assert not can_measure((x.as_subclass(Sharded), weight))
    with torch.no_grad():
        assert not can_measure((x, weight))
    with FlopCounterMode(display=False):
        assert not can_measure((x, weight))
    with AllocatorTrace():
        assert not can_measure((x, weight))


def test_graphs_that_reach_other_ranks_are_not_run_alone() -> None:
    def alone(x: Tensor) -> Tensor:
        return torch.tanh(x)

    def collective(x: Tensor) -> Tensor:
        return torch.ops._c10d_functional.all_reduce(x, "sum", "0")

    traced = [torch.fx.symbolic_trace(function) for function in (alone, collective)]
    assert [module_under_test._is_measurable(graph, ()) for graph in traced] == [True, False]


# --- the promise ---------------------------------------------------------------------------------------------------


def whole_peak(depth: int, budget: float) -> int:
    """What a whole step really takes above its weights and gradients, by the allocator."""
    torch._dynamo.reset()
    model = Stack(width=128, depth=depth, dropout=0.0).train()
    as_torch_compiles(model, budget, inductor)
    model(ids(8)).sum().backward()
    with AllocatorTrace() as trace:
        model(ids(8)).sum().backward()
    return trace.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "budget"), [(6, 0.3), (1, 0)])
@pytest.mark.filterwarnings("ignore::lightning_memkit.NoEffectWarning")
def test_the_prediction_is_the_change_of_the_whole_models_peak(
    depth: int, budget: float, always_asked: list[dict[float, float]]
) -> None:
    model = Stack(width=128, depth=depth, dropout=0.0).train()
    checkpoint_modules(model, f"compile:{budget}", blocks=["Block"])
    model(ids(8)).sum().backward()
    predicted = always_asked[0][budget] - always_asked[0][1.0]
    real = whole_peak(depth, budget) - whole_peak(depth, 1.0)
    assert real == pytest.approx(predicted, rel=0.1)

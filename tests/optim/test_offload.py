# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
"""Optimizer states in host memory: the same bits, less device memory, on an accelerator without hardware."""

import copy
import gc
import io
import math
import weakref

import lion_pytorch
import pytest
import schedulefree
import torch
from torch import nn
from torch.nn import Parameter

from lightning_memkit.optim import state_home
from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.gradient_release import release_gradients
from lightning_memkit.optim.offload import offload_of, offload_states
from lightning_memkit.optim.split import LOW_HALF
from lightning_memkit.optim.state_home import tensors_of
from lightning_memkit.utilities.errors import NoEffectWarning
from tests.optim.helpers import OPTIMIZERS, all_tensors, assert_same_bits, shapes_for, two_groups
from tests.testing.fake_device import fake_device
from tests.testing.needs import NEEDS_COMPILER

pytestmark = [NEEDS_COMPILER, pytest.mark.usefixtures("short_rows")]


@pytest.fixture(autouse=True, scope="module")
def no_leftovers():
    """What earlier tests left in cycles, a Trainer and its parts, is not these tests'."""
    gc.collect()


@pytest.fixture(autouse=True)
def no_hazards():
    """No tensor is freed while a copy of its states is under way, in any test."""
    with fake_device() as device:
        yield
        assert device.hazards == 0


FAKE = "fake"
SMALL = 1 << 12  # every parameter of a test is a bucket of its own, or nearly
MORE = {
    "Lion": lambda groups: lion_pytorch.Lion(groups, lr=1e-3, weight_decay=0.1),
    "ScheduleFree": lambda groups: schedulefree.AdamWScheduleFree(groups, lr=1e-2, warmup_steps=2),
    "AdamW-capturable": lambda groups: torch.optim.AdamW(groups, lr=1e-3, capturable=True),
}
PLAIN = None
COMPENSATED = {"mode": "split", "states": "exact"}
COMPACT = {"mode": "kahan", "states": "compact"}
EIGHT_BIT = {"mode": "split24", "states": "8-bit"}


def parameters(name="AdamW-single", dtype=torch.float32, device=FAKE):
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(shape, generator=generator) for shape in shapes_for(name)]
    return [Parameter(weight.to(device, dtype)) for weight in weights]


def set_gradients(shown, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in shown:
        noise = torch.randn(parameter.shape, generator=generator)
        gradient = (0.1 * parameter.detach().cpu().float() + 0.1 * noise).to(parameter.dtype)
        parameter.grad = gradient.to(parameter.device)


def build(name, compensation, *, offload, device=FAKE):
    """An optimizer, its parameters and a scheduler, all set up in the order that Lightning takes."""
    shown = parameters(name, torch.float32 if compensation is None else torch.bfloat16, device)
    optimizer = {**OPTIMIZERS, **MORE}[name](two_groups(shown))
    if hasattr(optimizer, "train"):
        optimizer.train()
    if compensation is not None:
        compensate(optimizer, **compensation)
    if offload:
        offload_states(optimizer, bucket_bytes=SMALL)
    return shown, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def train(shown, optimizer, scheduler, steps):
    for seed in steps:
        set_gradients(shown, seed)
        nn.utils.clip_grad_norm_(shown, 1.0)
        optimizer.step()
        scheduler.step()


def on_cpu(optimizer):
    return [tensor.cpu() for tensor in all_tensors(optimizer)]


def powers_of_two(optimizer):
    """What torch's allocator of pinned memory takes for the states."""
    sizes = [t.nbytes for state in optimizer.state.values() for t in tensors_of(state) if t.is_pinned()]
    return sum(2 ** math.ceil(math.log2(size)) for size in sizes)


def device_states(optimizer):
    return [t for state in optimizer.state.values() for t in tensors_of(state) if t.device.type != "cpu"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "compensation", [PLAIN, COMPENSATED, COMPACT, EIGHT_BIT], ids=["plain", "exact", "compact", "8-bit"]
)
@pytest.mark.parametrize("name", [*OPTIMIZERS, *MORE])
def test_every_bit_is_as_without_it(name, compensation):
    with fake_device() as device:
        results = []
        for offload in (False, True):
            run = build(name, compensation, offload=offload)
            device.reset_counts()
            train(*run, range(5))
            results.append(on_cpu(run[1]))
        assert device_states(run[1]) == []
        assert all(t.is_pinned() for state in run[1].state.values() for t in tensors_of(state))
        assert_same_bits(*results)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "compensation", [PLAIN, COMPENSATED, COMPACT, EIGHT_BIT], ids=["plain", "exact", "compact", "8-bit"]
)
@pytest.mark.parametrize("name", ["AdamW-single", "AdamW-fused", "NAdam", "ASGD", "SGD", "Muon", "Lion"])
def test_a_run_resumes_bitwise_and_takes_no_device_memory_for_it(name, compensation):
    with fake_device() as device:
        whole = build(name, compensation, offload=True)
        train(*whole, range(6))
        first = build(name, compensation, offload=True)
        train(*first, range(3))
        file = io.BytesIO()
        weights = [parameter.detach().cpu() for parameter in first[0]]
        torch.save([copy.copy(part.state_dict()) for part in first[1:]], file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        second = build(name, compensation, offload=True)
        for parameter, weight in zip(second[0], weights, strict=True):
            parameter.data.copy_(weight)
        before = device.live_bytes
        device.reset_peak()
        for part, state in zip(second[1:], saved, strict=True):
            part.load_state_dict(state)
        assert device.peak_bytes - before <= 64  # the scalars that the optimizer wants on the device
        kept = copy.deepcopy(saved)
        train(*second, range(3, 6))
        assert_same_bits(on_cpu(second[1]), on_cpu(whole[1]))
        assert_equal_nested(saved, kept)  # what was loaded belongs to the caller


def assert_equal_nested(first, second):
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, (dict, list, tuple)):
        keys = first if isinstance(first, dict) else range(len(first))
        for key in keys:
            assert_equal_nested(first[key], second[key])
    else:
        assert first == second


def test_a_checkpoint_of_a_run_without_it_is_resumed_with_it_and_back():
    with fake_device():
        whole = build("AdamW-single", PLAIN, offload=False)
        train(*whole, range(6))
        run = build("AdamW-single", PLAIN, offload=False)
        train(*run, range(2))
        for offload, steps in ((True, range(2, 4)), (False, range(4, 6))):
            other = build("AdamW-single", PLAIN, offload=offload)
            for new, old in zip(other[0], run[0], strict=True):
                new.data.copy_(old)
            for new, old in zip(other[1:], run[1:], strict=True):
                new.load_state_dict(old.state_dict())
            train(*other, steps)
            run = other
        assert_same_bits(on_cpu(run[1]), on_cpu(whole[1]))


def test_a_load_that_fails_leaves_the_parameters():
    with fake_device():
        shown, optimizer, scheduler = build("AdamW-single", PLAIN, offload=True)
        train(shown, optimizer, scheduler, range(1))
        before = on_cpu(optimizer)
        with pytest.raises(ValueError, match="different number of parameter groups"):
            optimizer.load_state_dict({"state": {}, "param_groups": []})
        assert [p for group in optimizer.param_groups for p in group["params"]] == shown
        assert_same_bits(on_cpu(optimizer), before)


@pytest.mark.parametrize("compensation", [PLAIN, COMPACT], ids=["plain", "compact"])
def test_the_device_holds_three_buckets_of_states_and_each_crosses_twice(compensation):
    count, size = 20, 1000
    dtype = torch.float32 if compensation is None else torch.bfloat16
    state_bytes = 8 * size if compensation is None else 6 * size
    with fake_device() as device:
        peaks = []
        for offload in (False, True):
            shown = [Parameter(torch.randn(size).to(FAKE, dtype)) for _ in range(count)]
            optimizer = torch.optim.AdamW(shown, foreach=False)
            if compensation is not None:
                compensate(optimizer, bucket_bytes=1, **compensation)
            handle = offload_states(optimizer, bucket_bytes=state_bytes) if offload else None
            for seed in range(2):
                set_gradients(shown, seed)
                device.reset_peak()
                device.reset_counts()
                before = device.live_bytes
                optimizer.step()
                peaks.append((device.peak_bytes - before, device.live_bytes - before))
            if handle is not None:
                assert handle.bytes_on_host() == count * state_bytes
                assert device.pinned_bytes == powers_of_two(optimizer)
                assert device.transfers.to_device_bytes == count * state_bytes
                assert device.transfers.to_host_bytes == count * state_bytes
            del shown, optimizer, handle
            assert device.live_bytes == 0
        (_, states_stay), (beside, _), (first_step, left_first), (step, left) = peaks
        assert states_stay == count * state_bytes
        assert left == left_first == 0
        # What the arithmetic itself needs is the same with and without; states add three buckets.
        assert step <= beside + 3 * state_bytes
        assert first_step <= beside + 3 * state_bytes
        assert step >= 3 * state_bytes


def test_a_bucket_takes_small_parameters_together_and_a_large_one_alone():
    with fake_device() as device:
        shown = [Parameter(torch.randn(size, device=FAKE)) for size in (10, 10, 1000, 10)]
        steps = []

        class Counting(torch.optim.SGD):
            def step(self, closure=None):
                steps.append(
                    [p.numel() for g in self.param_groups for p in g["params"] if p.grad is not None]
                )
                return super().step(closure)

        optimizer = Counting(shown, lr=0.1, momentum=0.9)
        offload_states(optimizer, bucket_bytes=200)
        set_gradients(shown, 0)
        optimizer.step()
        assert steps == [[10, 10], [1000], [10]]
        assert device.live_bytes == 2 * 4 * 1030


def test_parameters_on_the_host_step_along():
    with fake_device():
        results = []
        for offload in (False, True):
            shown = [*parameters(), *parameters(device="cpu")]
            optimizer = torch.optim.AdamW(shown, lr=1e-2)
            if offload:
                offload_states(optimizer, bucket_bytes=SMALL)
            for seed in range(3):
                set_gradients(shown, seed)
                optimizer.step()
            results.append(on_cpu(optimizer))
        assert_same_bits(*results)


def test_groups_added_later_and_undo():
    with fake_device():
        results = []
        for offload in (False, True):
            shown, later = parameters(), parameters()
            optimizer = torch.optim.AdamW(shown, lr=1e-2)
            set_gradients(shown, 0)
            optimizer.step()
            handle = offload_states(optimizer, bucket_bytes=SMALL) if offload else None
            if handle is not None:
                assert device_states(optimizer) == []
            optimizer.add_param_group({"params": later, "lr": 1e-1})
            set_gradients([*shown, *later], 1)
            optimizer.step()
            if handle is not None:
                handle.undo()
                handle.undo()  # twice does no harm
                assert offload_of(optimizer) is None
                assert not {"step", "load_state_dict"} & optimizer.__dict__.keys()
                assert len(device_states(optimizer)) == 4 * len(shown)
            set_gradients([*shown, *later], 2)
            optimizer.step()
            results.append(on_cpu(optimizer))
        assert_same_bits(*results)


def release_all(optimizer):
    release_gradients(optimizer, bundle_bytes=0)


def offload_all(optimizer):
    offload_states(optimizer, bucket_bytes=SMALL)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("compensation", [PLAIN, COMPACT], ids=["plain", "compact"])
@pytest.mark.parametrize(
    "order", [(release_all, offload_all), (offload_all, release_all)], ids=["release first", "offload first"]
)
def test_it_goes_with_gradient_release(order, compensation, scheduled):
    with fake_device():
        results = []
        for combined in (False, True):
            shown = parameters(dtype=torch.float32 if compensation is None else torch.bfloat16)
            optimizer = torch.optim.AdamW(shown, lr=1e-2)
            if compensation is not None:
                compensate(optimizer, **compensation)
            if scheduled:
                torch.optim.lr_scheduler.ConstantLR(optimizer)
            for wrap in order if combined else ():
                wrap(optimizer)
            for seed in range(3):
                torch.manual_seed(seed)
                loss = sum((p.float() * torch.randn(p.shape).to(FAKE)).sin().sum() for p in shown)
                loss.backward()  # pyright: ignore[reportAttributeAccessIssue]
                optimizer.step()
                optimizer.zero_grad()
            results.append(on_cpu(optimizer))
            if combined:
                assert device_states(optimizer) == []
        assert_same_bits(*results)


def test_compensation_may_come_later():
    with fake_device():
        results = []
        for offload in (False, True):
            shown = parameters(dtype=torch.bfloat16)
            optimizer = torch.optim.AdamW(shown, lr=1e-2)
            if offload:
                offload_states(optimizer, bucket_bytes=SMALL)
            compensation = compensate(optimizer, **COMPACT)
            for seed in range(3):
                set_gradients(shown, seed)
                optimizer.step()
            results.append(on_cpu(optimizer))
        assert device_states(optimizer) == []
        assert_same_bits(*results)
        compensation.undo()
        set_gradients(shown, 3)
        optimizer.step()
        assert device_states(optimizer) == []


def test_a_step_that_fails_leaves_the_states_of_its_bucket_at_home():
    with fake_device() as device:
        shown, optimizer, scheduler = build("AdamW-single", PLAIN, offload=True)
        train(shown, optimizer, scheduler, range(2))
        set_gradients(shown, 2)
        before = on_cpu(optimizer)
        device.set_limits(budget_bytes=device.live_bytes)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
        device.set_limits()
        assert device_states(optimizer) == []
        after = on_cpu(optimizer)
        assert_same_bits([t for t in after if t.dim()], [t for t in before if t.dim()])


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_between_buckets_lets_no_memory_go_that_is_being_written(failing):
    class Failing(torch.optim.SGD):
        fails = False
        bucket = 0

        def step(self, closure=None):
            self.bucket += 1
            if self.fails and self.bucket == failing:
                raise RuntimeError("a bucket that fails")
            return super().step(closure)

    with fake_device() as device:
        shown = [Parameter(torch.randn(100, device=FAKE)) for _ in range(4)]
        optimizer = Failing(shown, lr=0.1, momentum=0.9)
        offload_states(optimizer, bucket_bytes=1)
        for optimizer.fails in (False, True):
            optimizer.bucket = 0
            set_gradients(shown, 0)
            if optimizer.fails and failing > 0:
                with pytest.raises(RuntimeError, match="a bucket that fails"):
                    optimizer.step()
            elif optimizer.fails:  # no room for the second bucket, while the first is on its way
                device.set_limits(budget_bytes=device.live_bytes + 400)
                with pytest.raises(torch.OutOfMemoryError):
                    optimizer.step()
                device.set_limits()
            else:
                optimizer.step()
        gc.collect()
        assert device_states(optimizer) == []
        assert device.hazards == 0


def test_states_in_dicts_and_lists_travel_too():
    class Nested(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
            for parameter in [p for p in self.param_groups[0]["params"] if p.grad is not None]:
                state = self.state[parameter]
                if not state:
                    state["pair"] = [
                        torch.zeros_like(parameter),
                        {"count": 0, "sum": torch.zeros_like(parameter)},
                    ]
                first, inner = state["pair"]
                assert first.device == inner["sum"].device == parameter.device
                first.add_(parameter.grad)
                inner["count"] += 1
                inner["sum"] += first
                parameter.data.sub_(inner["sum"], alpha=0.1)

    with fake_device() as device:
        shown = parameters()
        optimizer = Nested(shown)
        offload = offload_states(optimizer, bucket_bytes=SMALL)
        twins = parameters(device="cpu")
        twin_optimizer = Nested(twins)
        for seed in range(3):
            set_gradients(shown, seed)
            set_gradients(twins, seed)
            optimizer.step()
            twin_optimizer.step()
        assert_same_bits([p.detach().cpu() for p in shown], [p.detach() for p in twins])
        assert device_states(optimizer) == []
        assert optimizer.state[shown[0]]["pair"][1]["count"] == 3
        assert device.pinned_bytes == powers_of_two(optimizer)
        assert offload.bytes_on_host() == sum(2 * p.nbytes for p in shown)
        offload.undo()
        assert device.pinned_reserved_bytes == 0


def test_unpinned_memory_on_request():
    with fake_device() as device:
        shown = parameters()
        optimizer = torch.optim.AdamW(shown)
        offload_states(optimizer, pin_memory=False)
        set_gradients(shown, 0)
        optimizer.step()
        assert device_states(optimizer) == []
        assert device.pinned_bytes == 0


def test_the_closure_runs_once_and_step_hooks_fire_once():
    with fake_device():
        shown, optimizer, _ = build("AdamW-single", PLAIN, offload=True)
        calls = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))

        def closure():
            calls.append("closure")
            assert torch.is_grad_enabled()
            set_gradients(shown, 0)
            return 42.0

        assert optimizer.step(closure) == 42.0
        assert calls == ["before", "closure", "after"]


@pytest.mark.parametrize("compensation", [PLAIN, COMPACT], ids=["plain", "compact"])
def test_the_optimizers_memory_goes_with_it(compensation):
    with fake_device() as device:
        before = device.pinned_bytes
        shown = parameters(dtype=torch.float32 if compensation is None else torch.bfloat16)
        optimizer = torch.optim.AdamW(shown)
        if compensation is not None:
            compensate(optimizer, **compensation)
        handle = offload_states(optimizer)
        set_gradients(shown, 0)
        optimizer.step()
        assert device.pinned_bytes > before
        gone = weakref.ref(optimizer)
        gc.disable()  # a cycle would keep the states until the garbage collector comes by
        try:
            del optimizer
            assert gone() is None
            assert device.pinned_bytes == before
            with pytest.raises(ReferenceError, match="keep a reference to it"):
                handle.bytes_on_host()
        finally:
            gc.enable()


def test_parameters_on_the_cpu_are_reported():
    with pytest.warns(NoEffectWarning, match="are on cpu, which computes in host memory"):
        offload_states(torch.optim.AdamW(parameters(device="cpu")))


def test_what_can_not_be_offloaded_is_refused():
    shown = [Parameter(torch.randn(2))]
    with pytest.raises(TypeError, match=r"LBFGS\.step demands a closure"):
        offload_states(torch.optim.LBFGS(shown))
    with pytest.raises(ValueError, match="bucket_bytes=0 must be 1 or more"):
        offload_states(torch.optim.SGD(shown), bucket_bytes=0)
    paged = torch.optim.SGD(shown)
    paged.is_paged = True  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="pages its states between device and host itself"):
        offload_states(paged)
    with pytest.raises(ValueError, match="differentiable=True"):
        offload_states(torch.optim.SGD(shown, differentiable=True))
    twice = torch.optim.SGD(shown)
    with pytest.warns(NoEffectWarning):
        offload_states(twice)
    with pytest.raises(ValueError, match="offloaded already"):
        offload_states(twice)
    for options in ({"max_grad_norm": 1.0}, {"d": 1e-6, "growth_rate": 2.0}):
        whole_model = torch.optim.SGD([{"params": shown, **options}])
        with pytest.raises(ValueError, match="can't see"):
            offload_states(whole_model)


def test_buckets_of_the_first_compensated_step_count_on_the_states_to_come():
    parameter = torch.nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.AdamW([parameter])
    assert state_home._bytes_of(optimizer, parameter) == 8000
    optimizer.state[parameter] = {LOW_HALF: torch.zeros(1000, dtype=torch.int16)}
    assert state_home._bytes_of(optimizer, parameter) == 10_000
    optimizer.state[parameter]["exp_avg"] = torch.zeros(1000, dtype=torch.bfloat16)
    assert state_home._bytes_of(optimizer, parameter) == 4000

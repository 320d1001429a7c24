# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
"""Budgets where a device computes beside its host: the slower of the two decides how a block runs."""

import copy
import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memkit import checkpoint_modules
from lightning_memkit.activations import planned
from lightning_memkit.activations.choosing import choices
from lightning_memkit.activations.profiling import OperatorCost, Profiler
from lightning_memkit.activations.second_run import SecondRun
from lightning_memkit.activations.tape import RECORDING_SECONDS, RUNNING_AGAIN_SECONDS, Tape
from lightning_memkit.memory.clocks import WaitingClocks
from lightning_memkit.memory.meter import ByteMeter
from tests.activations.models import ConvNet, Stack
from tests.activations.test_checkpointing import assert_same, ids, images, run
from tests.testing.fake_device import fake_device
from tests.testing.needs import NEEDS_COMPILER

FAST, SLOW = {"host": 1e-5, "device": 2e-6}, {"host": 1e-5, "device": 1e-2}


class SimulatedGPU(TorchDispatchMode):
    """A device with a queue beside its host, by the clock: each operator takes `host` seconds to launch.

    Within it, what is computed on the CPU launches kernels of `device` seconds, which run one after the other.
    """

    def __init__(self, host: float, device: float) -> None:
        super().__init__()
        self.host, self.device = host, device
        self.host_now = self.device_free = 0.0
        self.waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._launch(self.device)
        return func(*args, **(kwargs or {}))

    def _launch(self, seconds: float) -> None:
        self.host_now += self.host
        self.device_free = max(self.device_free, self.host_now) + seconds

    def keep_busy(self) -> None:
        self._launch(1.0)

    def mark(self) -> float:
        return max(self.device_free, self.host_now)

    def seconds_between(self, first: float, second: float) -> float:
        self.waits += 1
        self.host_now = max(self.host_now, second)
        return second - first

    def now(self) -> float:
        return self.host_now


def on(gpu, monkeypatch):
    """Let budgets take the CPU for this device."""
    monkeypatch.setattr(planned, "Profiler", lambda: Profiler(lambda device: gpu))


@pytest.fixture
def ran(monkeypatch):
    """How often blocks ran whole, and from a tape that follows a choice."""
    counts = Counter()

    def count(name):
        plain = getattr(planned, name)
        monkeypatch.setattr(planned, name, lambda *args: counts.update([name]) or plain(*args))

    count("run_checkpointed")
    count("run_recorded")
    return counts


def cost(device, host, *, earlier=None, saved=True, pinned=False, size=100):
    return OperatorCost(
        func=None,
        seconds=device,
        host_seconds=host,
        sizes=(size,),
        saves=(saved,),
        inputs=() if earlier is None else ((earlier, 0),),
        pinned=pinned,
    )


def chain(device, host, length=6, **options):
    """Of operators that each read the one before; the last one's output is not saved, so it never runs again."""
    chained = [cost(device, host, earlier=index - 1 if index else None) for index in range(length - 1)]
    return [*chained, cost(device, host, earlier=length - 2, saved=False, **options)]


# The choice


def test_a_block_that_its_host_bounds_runs_whole_or_is_left_alone():
    front = choices(chain(2e-6, 1e-5), whole=True)
    assert [(choice.whole, choice.keep is None) for choice in front] == [(True, False), (False, True)]
    assert front[0].size_bytes == 0
    assert front[0].seconds == pytest.approx(
        6 * 1e-5
    )  # one more launch of each: the device waits for its host
    assert front[1].seconds == 0


def test_a_block_that_its_device_bounds_runs_from_a_tape():
    front = choices(chain(1e-2, 1e-5), whole=True)
    assert not any(choice.whole for choice in front)
    assert front[0].seconds == pytest.approx(5 * 1e-2)  # and not 6: the tape hides behind the device
    assert len(front) > 2


def test_between_the_two_a_tape_costs_what_the_device_does_not_hide():
    operators = chain(2e-5, 1e-5)
    plain, host = 6 * 2e-5, 11 * 1e-5 + 6 * RECORDING_SECONDS + 5 * RUNNING_AGAIN_SECONDS
    assert host > 11 * 2e-5
    (least, *_) = choices(operators)
    assert least.seconds == pytest.approx(host - plain)
    (least, *_) = choices(operators, whole=True)
    assert least.whole
    assert least.seconds == pytest.approx(6 * 2e-5)  # all of it once more, which the device bounds again


def test_where_host_and_device_are_one_no_block_runs_whole():
    operators = chain(1e-7, 0.0)  # a tape's own work is all of the time
    assert choices(operators, whole=True) == choices(operators)


def test_what_must_not_run_twice_leaves_no_block_to_run_whole():
    front = choices(chain(2e-6, 1e-5, pinned=True), whole=True)
    assert not any(choice.whole for choice in front)


# What is measured


@pytest.mark.parametrize("speed", [FAST, SLOW], ids=["fast", "slow"])
def test_device_and_host_are_timed_apart_and_no_run_waits(speed):
    gpu = SimulatedGPU(**speed)
    x, weight = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    with gpu:
        tape = Tape(lambda operator: True)
        out = tape.record(lambda: nn.functional.dropout((x @ weight).relu_(), 0.5), [x])
        random_state = torch.get_rng_state()
        profile = Profiler(lambda device: gpu).profile(tape, [out], 0, ((4, 8),))
    assert len(profile.operators) >= 3
    assert torch.equal(torch.get_rng_state(), random_state)
    assert gpu.waits == 3 * len({cost.func for cost in profile.operators})
    for measured in profile.operators:
        assert measured.host_seconds == pytest.approx(speed["host"])
        assert measured.seconds == pytest.approx(speed["device"], rel=0.1)
    tape.finish([out])


@NEEDS_COMPILER
def test_beside_an_accelerator_the_hosts_own_operators_take_the_hosts_time():
    gpu = SimulatedGPU(**FAST)
    with fake_device() as device, gpu:
        x = torch.randn(4, 8, requires_grad=True).to(device.torch_device)
        tape = Tape(lambda operator: True)
        out = tape.record(lambda: x.sin().cpu().cos(), [x])
        profiler = Profiler(lambda device: None if device.type == "cpu" else gpu)
        profile = profiler.profile(tape, [out], 0, ((4, 8),))
        tape.finish([out])
    first, *_, last = profile.operators
    assert first.seconds > 0
    assert last.seconds == 0
    assert all(operator.host_seconds > 0 for operator in profile.operators)


# Blocks that run


@pytest.mark.parametrize(("speed", "whole"), [(FAST, True), (SLOW, False)], ids=["fast", "slow"])
@pytest.mark.parametrize(("build", "batch"), [(Stack, ids), (ConvNet, images)], ids=["dropout", "batchnorm"])
def test_blocks_run_as_the_slower_of_device_and_host_asks_bit_by_bit(
    build, batch, speed, whole, monkeypatch, ran
):
    gpu = SimulatedGPU(**speed)
    on(gpu, monkeypatch)
    model = build().train()
    ours = copy.deepcopy(model)
    checkpoint_modules(ours, "budget:0.6")
    with gpu:
        assert_same(run(ours, batch()), run(model, batch()))
    ran.clear()
    for _ in range(2):
        assert_same(run(ours, batch(), backwards=2), run(model, batch(), backwards=2))
    assert bool(ran["run_checkpointed"]) == whole
    assert bool(ran["run_recorded"]) != whole
    if whole:
        assert sum(ran.values()) < 2 * 4  # some of the four blocks are left alone


def test_whole_blocks_meet_the_budget(monkeypatch):
    gpu = SimulatedGPU(**FAST)
    on(gpu, monkeypatch)
    model = Stack(width=64, depth=8).train()
    batch = ids(4, 32)

    def alive():
        with ByteMeter() as meter:
            out = model(batch)
            found = meter.live_bytes - out.nbytes
        out.sum().backward()
        return found

    plain = alive()
    undo = checkpoint_modules(model, "budget:0.5")
    with gpu:
        alive()
    assert alive() <= 0.505 * plain
    undo()
    assert alive() == plain


def test_on_the_cpu_no_block_runs_whole(ran):
    model = Stack().train()
    checkpoint_modules(model, "budget:0.5")
    for _ in range(3):
        run(model, ids())
    assert not ran["run_checkpointed"]
    assert ran["run_recorded"]


class Keeping(nn.Module):
    """A block that keeps something beside its buffers, or writes to its input."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(8, 8)
        self.calls, self.level, self.seen = 0, torch.zeros(()), []

    def forward(self, x):
        if self.kind == "counter":
            self.calls += 1
        elif self.kind == "tensor":
            self.level += 1
        elif self.kind == "list":
            self.seen.append(1)
        elif self.kind == "random":
            x = x * random.random()
        elif self.kind == "numpy":
            x = x * np.random.rand()
        elif self.kind == "input":
            x.add_(1)
        elif self.kind == "weight":
            with torch.no_grad():
                self.layer.weight.mul_(0.5)
        return torch.tanh(self.layer(x) + self.calls + self.level).sigmoid().exp().cos()


@pytest.mark.parametrize("kind", ["none", "counter", "tensor", "list", "random", "numpy", "input", "weight"])
def test_a_block_that_keeps_what_no_buffer_holds_runs_once_a_step(kind, monkeypatch, ran):
    gpu = SimulatedGPU(**FAST)
    on(gpu, monkeypatch)
    model = nn.Sequential(*(Keeping(kind) for _ in range(3))).train()
    ours = copy.deepcopy(model)
    checkpoint_modules(ours, "budget:0.5")

    def step(network):
        random.seed(1)
        np.random.seed(1)
        return run(nn.Sequential(nn.Identity(), network), torch.ones(256, 8) + 0)

    with gpu:
        assert_same(step(ours), step(model))
    for _ in range(2):
        assert_same(step(ours), step(model))
    assert bool(ran["run_checkpointed"]) == (kind == "none")
    for mine, theirs in zip(ours, model, strict=True):
        assert (mine.calls, len(mine.seen)) == (theirs.calls, len(theirs.seen))
        assert torch.equal(mine.level, theirs.level)


def test_a_forward_that_gives_other_bits_a_second_time_is_seen():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.counts = iter(range(10))  # advanced unseen

        def forward(self, x):
            return x + next(self.counts)

    for block, same in ((Counting(), False), (nn.Dropout(0.5), True), (nn.BatchNorm1d(8), True)):
        x = torch.randn(4, 8)
        before = SecondRun(block, (x,), {})
        out = block(x)
        state = {name: buffer.clone() for name, buffer in block.named_buffers()}
        assert before.gives(out, block) == same
        for name, buffer in block.named_buffers():
            assert torch.equal(buffer, state[name])


# An accelerator without hardware


@NEEDS_COMPILER
@pytest.mark.parametrize(("speed", "whole"), [(FAST, True), (SLOW, False)], ids=["fast", "slow"])
def test_on_an_accelerator_gradients_are_bitwise_the_plain_ones(speed, whole, monkeypatch, ran):
    with fake_device() as device:
        gpu = SimulatedGPU(**speed)
        on(gpu, monkeypatch)
        model = nn.Sequential(*Stack(dropout=0.3).blocks).to(device.torch_device).train()
        ours = copy.deepcopy(model)
        checkpoint_modules(ours, "budget:0.5")
        x = torch.randn(2, 8, 32).to(device.torch_device)
        with gpu:
            assert_same(run(ours, x), run(model, x))
        ran.clear()
        assert_same(run(ours, x), run(model, x))
        assert bool(ran["run_checkpointed"]) == whole
        assert bool(ran["run_recorded"]) != whole


@NEEDS_COMPILER
def test_an_accelerator_whose_events_tell_no_time_is_waited_for(monkeypatch):
    made = []
    plain = WaitingClocks.__init__
    monkeypatch.setattr(WaitingClocks, "__init__", lambda self, of: made.append(of.type) or plain(self, of))
    with fake_device() as device:
        model = nn.Sequential(*Stack().blocks).to(device.torch_device).train()
        ours = copy.deepcopy(model)
        checkpoint_modules(ours, "budget:0.5")
        x = torch.randn(2, 8, 32).to(device.torch_device)
        for _ in range(2):
            assert_same(run(ours, x), run(model, x))
    assert set(made) == {"fake"}

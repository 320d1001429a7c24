# pyright: reportArgumentType=false, reportCallIssue=false
"""Operators on a tape: what is dropped comes back bit by bit, and what can't be made again is kept."""

import gc
import random
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lightning_memkit.activations.tape import Tape
from lightning_memkit.memory.allocator_trace import AllocatorTrace
from lightning_memkit.memory.meter import ByteMeter


def gradients(function, x, weights, keep=None, backwards=1):
    """Gradients of a function, on a tape where `keep` is given."""
    x = x.detach().clone().requires_grad_()
    for weight in weights:
        weight.grad = None
    torch.manual_seed(5)
    if keep is None:
        out = function(x)
    else:
        tape = Tape(keep)
        out = tape.record(lambda: function(x), [x])
        tape.finish([out])
    loss = out.square().sum()
    for index in range(backwards):
        loss.backward(retain_graph=index + 1 < backwards)
    return [x.grad, *(weight.grad for weight in weights), torch.get_rng_state()]


WEIGHT = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))


def written_in_place(x):
    y = (x @ WEIGHT).relu_()
    z = (y * 2).add_(y).sigmoid()
    return z * y


def with_dropout(x):
    return F.dropout(torch.tanh(F.dropout(x @ WEIGHT, 0.5)), 0.3) @ WEIGHT


def through_views(x):
    y = torch.view_as_complex((x @ WEIGHT).exp().view(4, 4, 2)).angle()
    return (y.t() @ y).softmax(-1)[:, 1:].contiguous().tanh()


def sliced_writes(x):
    y = torch.empty(4, 8)
    y[:, :4] = (x @ WEIGHT)[:, 4:]
    y[:, 4:] = torch.tanh(x)[:, :4]
    return y.exp() * y


FUNCTIONS = [written_in_place, with_dropout, through_views, sliced_writes]
KEEPS = {
    "nothing": lambda operator: False,
    "everything": lambda operator: True,
    "every second": lambda operator: operator.index % 2 == 0,
}


@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_are_bitwise_those_without_a_tape(function, backwards, keep):
    x = torch.randn(4, 8)
    for ours, plain in zip(
        gradients(function, x, [WEIGHT], keep, backwards),
        gradients(function, x, [WEIGHT], None, backwards),
        strict=True,
    ):
        assert torch.equal(ours, plain)


def test_only_what_is_needed_runs_again_and_once():
    weights = [nn.Parameter(torch.randn(64, 64)) for _ in range(3)]

    def chain(x):
        for weight in weights:
            x = torch.sigmoid(x @ weight)
        return x.sum()

    def flops(keep):
        x = torch.randn(64, 64, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            tape = Tape(keep)
            out = tape.record(lambda: chain(x), [x])
            tape.finish([out])
            out.backward()
        return counter.get_total_flops() / (2 * 64**3)

    assert flops(lambda operator: True) == 9
    assert flops(lambda operator: False) == 12
    assert (
        flops(lambda operator: operator.index == 3) == 11
    )  # the second sigmoid is kept: its matmul is not needed


def test_what_is_kept_and_not_needed_goes_at_the_end_of_the_forward():
    x = torch.randn(256, 256, requires_grad=True)

    def live(keep):
        tape = Tape(keep)
        with ByteMeter() as meter:
            out = tape.record(lambda: (x.sin() + 1).exp().sum(), [x])
            tape.finish([out])
            del tape
            found = meter.live_bytes
        out.backward()
        return found // (256 * 256 * 4)

    assert live(lambda operator: False) == 0
    assert live(lambda operator: True) == 1  # exp's result; sin's and the sum's are needed by nobody


def test_a_tape_dies_with_its_graph():
    x = torch.randn(4, 8)
    tape = Tape(lambda operator: operator.index % 2 == 0)
    out = tape.record(lambda: with_dropout(x), [x])
    tape.finish([out])
    reference = weakref.ref(tape)
    del tape
    assert reference() is not None
    gc.disable()
    try:
        out.sum().backward()
        del out
        assert reference() is None
    finally:
        gc.enable()


def test_what_a_tape_read_goes_with_its_graph_and_needs_no_garbage_collector():
    def step(x):
        between = torch.tanh(x @ torch.ones(64, 64, requires_grad=True))
        tape = Tape(lambda operator: operator.index % 2 == 0)
        out = tape.record(lambda: (between.sigmoid() * 2).exp(), [between])
        tape.finish([out])
        out.sum().backward()

    x = torch.randn(64, 64)
    gc.collect()
    gc.disable()
    try:
        with ByteMeter() as meter:
            for _ in range(3):  # the first step imports what raises errors, whose frames live on
                meter.forget()
                step(x)
                after = meter.live_bytes
    finally:
        gc.enable()
    assert after == 0


def test_a_meter_sees_what_the_allocator_hands_out_when_operators_run_again():
    def step():
        x = torch.randn(4096, 8).requires_grad_()
        tape = Tape(lambda operator: False)
        out = tape.record(lambda: written_in_place(x), [x])
        tape.finish([out])
        out.sum().backward()
        WEIGHT.grad = None

    step()
    gc.collect()
    with AllocatorTrace() as trace:
        step()
    with ByteMeter() as meter:
        step()
    assert meter.peak_bytes == pytest.approx(trace.peak_bytes, abs=64)
    assert trace.peak_bytes > 3 * 4096 * 8 * 4


def test_python_does_not_run_again():
    calls = []

    def noisy(x):
        calls.append(random.random())
        return torch.tanh(x * calls[-1]) @ WEIGHT

    x = torch.randn(4, 8, requires_grad=True)
    tape = Tape(lambda operator: False)
    out = tape.record(lambda: noisy(x), [x])
    tape.finish([out])
    out.sum().backward()
    mine = x.grad
    expected = torch.autograd.grad((torch.tanh(x * calls[0]) @ WEIGHT).sum(), x)[0]
    assert len(calls) == 1
    assert mine is not None
    assert torch.equal(mine, expected)


def test_buffers_that_the_forward_writes_are_read_as_they_were():
    level = torch.ones(8)

    def counting(x):
        y = torch.sigmoid(x + level)
        level.mul_(2)
        return torch.tanh(y + level)

    x = torch.randn(4, 8)
    plain = gradients(counting, x, [])
    level.fill_(1)
    ours = gradients(counting, x, [], lambda operator: False)
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(level, torch.full((8,), 2.0))


def test_an_input_changed_before_the_backward_is_refused():
    x = torch.randn(4, 8)
    tape = Tape(lambda operator: False)
    out = tape.record(lambda: torch.tanh(x @ WEIGHT).sum(), [x])
    tape.finish([out])
    x.add_(1)
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        out.backward()


def test_an_output_changed_in_place_by_others_is_made_again():
    x = torch.randn(4, 8, requires_grad=True)
    tape = Tape(lambda operator: True)
    out = tape.record(lambda: torch.sigmoid(x @ WEIGHT), [x])
    tape.finish([out])
    kept = out.detach().clone()
    with torch.no_grad():
        out.mul_(0)
    out.backward(torch.ones_like(out))
    assert x.grad is not None
    assert torch.equal(x.grad, (kept * (1 - kept)) @ WEIGHT.t())


@pytest.mark.parametrize("inside", [False, True])
def test_casts_are_those_of_the_forward_also_where_the_backward_runs_under_autocast(inside):
    x = torch.randn(4, 8)

    def function():
        return torch.tanh(x @ WEIGHT)

    def gradient(run):
        WEIGHT.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            out = run(function).float().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            out.backward()
        return WEIGHT.grad

    def taped(function):
        tape = Tape(lambda operator: False)
        out = tape.record(function, [x])
        tape.finish([out])
        return out

    assert torch.equal(gradient(taped), gradient(lambda function: function()))

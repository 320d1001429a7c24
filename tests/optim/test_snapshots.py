from typing import Any

import pytest
import torch

from lightning_memkit.initialization.casting import cast_module
from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.snapshots import (
    forget_new_states,
    known_states,
    restore_snapshot,
    take_snapshot,
)
from tests.optim.helpers import (
    OPTIMIZERS,
    all_tensors,
    assert_same_bits,
    bf16_twins,
    set_gradients,
    shapes_for,
    two_groups,
)


def run(parameters, optimizer, steps) -> None:
    for step in steps:
        set_gradients(parameters, seed=step)
        optimizer.step()


def test_new_states_may_stay_until_they_are_forgotten():
    """What existed is bitwise as before at once; what a step has made goes later."""
    first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = torch.optim.AdamW([first, second], lr=0.1)
    first.grad = torch.ones(3)
    optimizer.step()
    optimizer.state[second] = {"own": torch.full((3,), 7.0)}
    moments = optimizer.state[first]["exp_avg"].clone()
    weights = [first.detach().clone(), second.detach().clone()]
    known, snapshot = known_states(optimizer), take_snapshot(optimizer)
    first.grad = torch.full((3,), 2.0)
    optimizer.step()
    optimizer.state[second]["made"] = torch.zeros(3)
    restore_snapshot(optimizer, snapshot, keep_new=True)
    assert torch.equal(first, weights[0])
    assert torch.equal(optimizer.state[first]["exp_avg"], moments)
    assert float(optimizer.state[first]["step"]) == 1
    assert "made" in optimizer.state[second]
    forget_new_states(optimizer, known)
    assert optimizer.state[second].keys() == {"own"}
    assert optimizer.state.keys() == {first, second}


@pytest.mark.parametrize("mode", ["kahan", "split", "split24"])
def test_compensation_that_a_step_rewrites_counts_once(mode):
    """Low halves of another mode's checkpoint become Kahan's rest, or a byte, in a step: one of the two is held."""
    module = torch.nn.Linear(64, 64)
    low: dict[torch.nn.Parameter, torch.Tensor] = {}
    cast_module(module, torch.bfloat16, low_halves=low)
    optimizer = torch.optim.AdamW(module.parameters())
    owner = compensate(optimizer, mode=mode)
    for parameter, half in low.items():
        optimizer.state[parameter]["low_half"] = half
    known, snapshot = known_states(optimizer), owner.snapshot()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = sum(tensor.nbytes for tensor in all_tensors(optimizer))
    owner.restore(snapshot, keep_new=True)
    of_half_over_byte = sum(half.numel() for half in low.values()) if mode == "split24" else 0
    assert sum(tensor.nbytes for tensor in all_tensors(optimizer)) == after + of_half_over_byte
    forget_new_states(optimizer, known)
    assert all(set(state) == set(known[key]) for key, state in optimizer.state.items())


@pytest.mark.parametrize("warm_up_steps", [0, 2])
@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize("states", ["compact", "exact", "8-bit"])
@pytest.mark.parametrize("mode", ["kahan", "split", "split24", "stochastic", "none"])
@pytest.mark.parametrize("name", ["AdamW-foreach", "SGD", "Adagrad", "Muon"])
def test_a_trial_step_leaves_no_trace(name, mode, states, warm_up_steps):
    parameters, low_halves = bf16_twins([torch.randn(shape) for shape in shapes_for(name)])
    optimizer = OPTIMIZERS[name](two_groups(parameters))
    handle = compensate(optimizer, mode=mode, states=states, low_halves=low_halves)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    run(parameters, optimizer, range(warm_up_steps))
    before, keys = all_tensors(optimizer), list(optimizer.state)
    called = getattr(optimizer, "_opt_called", None)
    snapshot = handle.snapshot()
    run(parameters, optimizer, range(50, 53))
    optimizer.param_groups[0]["lr"] = 123.0
    optimizer.param_groups[0]["added"] = True
    changed = all_tensors(optimizer)
    assert len(changed) != len(before) or not all(map(torch.equal, before, changed))
    handle.restore(snapshot)
    assert_same_bits(before, all_tensors(optimizer))
    assert list(optimizer.state) == keys
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
    assert "added" not in optimizer.param_groups[0]
    assert getattr(optimizer, "_opt_called", None) == called
    run(parameters, optimizer, range(10, 12))
    first = all_tensors(optimizer)
    handle.restore(snapshot)  # good for a second time, and the noise is the same again
    run(parameters, optimizer, range(10, 12))
    assert_same_bits(first, all_tensors(optimizer))


def test_weights_can_be_left_to_the_caller():
    parameters, _ = bf16_twins([torch.randn(8, 8)])
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    handle = compensate(optimizer)
    snapshot = handle.snapshot(weights=False)
    run(parameters, optimizer, [0])
    trained = parameters[0].detach().clone()
    handle.restore(snapshot)
    assert torch.equal(parameters[0].detach(), trained)
    assert not optimizer.state


def test_plain_optimizers_are_rolled_back_too():
    parameter = torch.nn.Parameter(torch.randn(8, 8))
    optimizer = torch.optim.AdamW([parameter])
    run([parameter], optimizer, [0])
    before = all_tensors(optimizer)
    snapshot = take_snapshot(optimizer, device=torch.device("cpu"))
    run([parameter], optimizer, [1])
    restore_snapshot(optimizer, snapshot)
    assert_same_bits(before, all_tensors(optimizer))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("named", [False, True], ids=["list", "dictionary"])
def test_parameters_that_an_optimizer_holds_beside_its_own_are_restored(count, named):
    """A teacher's, say, which take gradients and are in no group."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer: Any = torch.optim.SGD([weight], lr=0.1)
    held = [torch.nn.Parameter(torch.full((4,), float(index))) for index in range(count)]
    optimizer.teacher = dict(enumerate(held)) if named else list(held)
    snapshot = take_snapshot(optimizer)
    with torch.no_grad():
        for index, parameter in enumerate(held):
            parameter.fill_(7.0 + index)
    restore_snapshot(optimizer, snapshot)
    for index, parameter in enumerate(held):
        assert torch.equal(parameter, torch.full((4,), float(index)))
        assert parameter.requires_grad

"""Which steps the kernels take over, and that taking over changes no more than float32's last bit."""

import pytest
import torch
from lion_pytorch import Lion
from torch.nn import Parameter

from lightning_memkit.optim import native
from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.fused import step as front_door
from lightning_memkit.optim.fused.taking import take
from lightning_memkit.optim.fused.wanted import StepStorage
from lightning_memkit.optim.modes import LOW_STATES
from lightning_memkit.optim.pieces import slots
from tests.optim.helpers import bf16_twins, set_gradients, two_groups

TAKEN = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1),
    "AdamW-fused": lambda groups: torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1, fused=True),
    "AdamW-tensor-lr": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(1e-3), foreach=False),
    "AdamW-maximize": lambda groups: torch.optim.AdamW(groups, lr=1e-3, maximize=True),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-3, weight_decay=0.1),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "SGD-momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, dampening=0.2),
    "SGD-nesterov": lambda groups: torch.optim.SGD(
        groups, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "Lion": lambda groups: Lion(groups, lr=1e-3, weight_decay=0.1),
    "Lion-decoupled": lambda groups: Lion(groups, lr=1e-3, weight_decay=1e-4, decoupled_weight_decay=True),
}


class Subclass(torch.optim.AdamW):
    """May mean something else by its step."""


LEFT = {
    "amsgrad": lambda groups: torch.optim.AdamW(groups, amsgrad=True),
    "subclass": Subclass,
    "Adagrad": torch.optim.Adagrad,
}


def trained(build, mode: str, *, fuse: bool, steps: int = 5):
    weights = [
        torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((40, 30), (30,), (5, 7))
    ]
    parameters, low_halves = bf16_twins(weights)
    optimizer = build(two_groups(parameters))
    handle = compensate(optimizer, mode=mode, low_halves=low_halves)  # pyright: ignore[reportArgumentType]
    handle.engine.may_fuse = fuse
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = (0.1 * torch.randn(parameter.shape, generator=generator)).bfloat16()
        optimizer.step()
    return optimizer, torch.cat([weight.flatten() for _, weight in handle.float32_weights()]).double()


@pytest.mark.parametrize("mode", ["kahan", "split", "split24"])
@pytest.mark.parametrize("name", TAKEN)
def test_a_fused_step_is_the_optimizers_own(name, mode):
    optimizer, fused = trained(TAKEN[name], mode, fuse=True)
    stock, shadowed = trained(TAKEN[name], mode, fuse=False)
    # The same noise rounds the same float32 values; where their last bit differs, a moment may round elsewhere.
    difference = (fused - shadowed).abs()
    assert (difference > 2e-6).double().mean() < 0.01
    assert difference.max() < 1e-4
    for group, other in zip(optimizer.param_groups, stock.param_groups, strict=True):
        for parameter, twin in zip(group["params"], other["params"], strict=True):
            ours, theirs = optimizer.state[parameter], stock.state[twin]
            assert ours.keys() == {key for key, value in theirs.items() if value is not None}
            for key in ours:
                assert ours[key].dtype == theirs[key].dtype
                if key not in LOW_STATES:  # those are compared above, joined with their weights
                    torch.testing.assert_close(ours[key].float(), theirs[key].float(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("name", [*TAKEN, *LEFT])
def test_what_is_taken_over(name):
    parameters, _ = bf16_twins([torch.randn(8, 3), torch.randn(5)])
    parameters.append(Parameter(torch.randn((), dtype=torch.float32).bfloat16()))  # a scalar
    optimizer = {**TAKEN, **LEFT}[name](two_groups(parameters))
    set_gradients(parameters, seed=0)
    ready = list(slots(optimizer))
    taken, others = take(optimizer, StepStorage("split"), ready)
    count = sum(len(operands) for _, operands in taken)
    assert count == (2 if name in TAKEN else 0)
    assert [slot.parameter for slot in others] == parameters[count:]
    if name in LEFT and name != "Adagrad":  # which makes its states at construction
        assert all(parameter not in optimizer.state for parameter in parameters)


def test_states_in_another_form_are_left_to_the_shadow_step():
    parameters, _ = bf16_twins([torch.randn(8, 3), torch.randn(8, 3), torch.randn(8, 3)])
    optimizer = torch.optim.AdamW(parameters)
    compensate(optimizer, mode="split")
    set_gradients(parameters, seed=0)
    optimizer.step()
    first = optimizer.state[parameters[0]]
    first["exp_avg"] = first["exp_avg"].float()  # as from a checkpoint of float32 training
    second = optimizer.state[parameters[1]]
    second["compensation"] = second.pop("low_half").bfloat16()  # as from a checkpoint of another mode
    _, others = take(optimizer, StepStorage("split"), list(slots(optimizer)))
    assert [slot.index for slot in others] == [0, 1]
    optimizer.step()  # carries both over
    _, others = take(optimizer, StepStorage("split"), list(slots(optimizer)))
    assert others == []
    assert {float(optimizer.state[parameter]["step"]) for parameter in parameters[:2]} == {3.0}


def test_gradients_of_other_strides_are_left_to_the_shadow_step():
    parameters, _ = bf16_twins([torch.randn(8, 3)])
    parameters[0].grad = torch.randn(3, 8).bfloat16().t()
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    expected = parameters[0].detach().float() - parameters[0].grad.float()
    handle = compensate(optimizer, mode="split")
    optimizer.step()
    assert torch.equal(next(iter(handle.float32_weights()))[1], expected)


def test_a_replaced_step_is_what_is_meant():
    parameters, _ = bf16_twins([torch.ones(4)])
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    calls = []
    optimizer.step = lambda closure=None: calls.append(optimizer.param_groups[0]["params"][0].dtype)  # pyright: ignore
    compensate(optimizer)
    parameters[0].grad = torch.ones_like(parameters[0])
    optimizer.step()
    assert calls == [torch.float32]
    assert torch.equal(parameters[0].detach().float(), torch.ones(4))


def test_exact_states_never_take_the_kernel(monkeypatch):
    def no_step(*_):
        raise AssertionError("a fused step was taken")

    monkeypatch.setattr("lightning_memkit.optim.open_step.fused_step", no_step)
    parameters, _ = bf16_twins([torch.ones(4)])
    for states in ("exact", "compact"):
        optimizer = torch.optim.AdamW(parameters)
        compensate(optimizer, states=states)  # pyright: ignore[reportArgumentType]
        parameters[0].grad = torch.ones_like(parameters[0])
        if states == "exact":
            optimizer.step()
        else:
            with pytest.raises(AssertionError, match="fused step"):
                optimizer.step()


def test_autograd_notices_a_fused_step():
    weight = Parameter(torch.randn(4, 4).bfloat16())
    optimizer = torch.optim.AdamW([weight])
    compensate(optimizer)
    loss = (weight @ weight).sum()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_missing_kernel_is_said_once_and_plain_torch_steps(monkeypatch):
    monkeypatch.setattr(native, "why_unavailable", lambda: "no compiler")
    front_door._has_kernel.cache_clear()
    native.available.cache_clear()
    parameters, _ = bf16_twins([torch.ones(4)])
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    compensate(optimizer)
    parameters[0].grad = torch.ones_like(parameters[0])
    try:
        with pytest.warns(UserWarning, match=r"plain torch on the CPU.*no compiler.*g\+\+"):
            optimizer.step()
        optimizer.step()
    finally:
        front_door._has_kernel.cache_clear()
        native.available.cache_clear()
    assert torch.equal(parameters[0].detach().float(), torch.zeros(4))

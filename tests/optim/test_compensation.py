"""The optimizer stays the user's: schedulers, hooks, groups, undo, and what is refused."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch.nn import Parameter

from lightning_memkit.optim.compensation import compensate, compensation_of
from lightning_memkit.utilities.errors import NoEffectWarning
from tests.optim.helpers import bf16_twins, set_gradients


def adamw(*shapes, **options):
    parameters, low_halves = bf16_twins([torch.randn(shape) for shape in shapes or [(4, 4)]])
    return parameters, low_halves, torch.optim.AdamW(parameters, lr=1e-2, **options)


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_schedulers_see_an_ordinary_optimizer(scheduler_first):
    parameters, _, optimizer = adamw()
    if not scheduler_first:
        compensate(optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if scheduler_first:
        compensate(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it sees no step, or a replaced one
        for _ in range(3):
            set_gradients(parameters, seed=0)
            optimizer.step()
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 8)


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_undo_gives_the_optimizer_back(scheduler_first):
    parameters, low_halves, optimizer = adamw(amsgrad=True)
    if scheduler_first:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    handle = compensate(optimizer, mode="split", states="exact", low_halves=low_halves)
    if not scheduler_first:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    set_gradients(parameters, seed=0)
    optimizer.step()
    handle.undo()
    handle.undo()  # twice does no harm
    assert compensation_of(optimizer) is None
    state = optimizer.state[parameters[0]]
    assert {name: value.dtype for name, value in state.items() if value.dim()} == dict.fromkeys(
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), torch.bfloat16
    )
    assert "memkit" not in optimizer.state_dict()
    reference = [Parameter(parameters[0].detach().clone())]
    plain = torch.optim.AdamW(reference, lr=1e-2, amsgrad=True)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    set_gradients(parameters, seed=1)
    set_gradients(reference, seed=1)
    optimizer.step()
    plain.step()
    assert torch.equal(parameters[0], reference[0])
    scheduler.step()  # pyright: ignore[reportPossiblyUnboundVariable]
    assert compensate(optimizer).mode == "kahan"  # and it can be compensated again


def test_undo_before_the_first_step_leaves_no_state():
    _, low_halves, optimizer = adamw()
    compensate(optimizer, mode="split", low_halves=low_halves).undo()
    assert not optimizer.state
    assert "step" not in optimizer.__dict__


def test_step_hooks_fire_once_a_step_and_the_closure_runs_once():
    parameters, _, optimizer = adamw((4, 4), (5, 5), (6,))
    compensate(optimizer, bucket_bytes=1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        calls.append("closure")
        assert torch.is_grad_enabled()
        set_gradients(parameters, seed=0)
        return 42.0

    assert optimizer.step(closure) == 42.0
    assert calls == ["before", "closure", "after"]


def test_zero_grad_and_groups_added_later():
    parameters, _, optimizer = adamw()
    handle = compensate(optimizer, mode="split", states="exact")
    later, low_halves = bf16_twins([torch.randn(3, 3)])
    optimizer.add_param_group({"params": later, "lr": 1e-1})
    set_gradients([*parameters, *later], seed=0)
    before = later[0].detach().clone()
    optimizer.step()
    assert not torch.equal(before, later[0].detach())
    assert optimizer.state[later[0]]["low_half"].dtype == torch.int16
    assert len(list(handle.float32_weights())) == 2
    optimizer.zero_grad()
    assert parameters[0].grad is None


@pytest.mark.parametrize(
    ("mode", "states", "expected"),
    [
        ("kahan", "compact", 10.0),
        ("split", "compact", 10.0),
        ("split", "exact", 14.0),
        ("stochastic", "compact", 8.0),
        ("none", "compact", 8.0),
    ],
)
def test_bytes_a_parameter(mode, states, expected):
    parameters, _, optimizer = adamw((200, 200))
    handle = compensate(optimizer, mode=mode, states=states)
    set_gradients(parameters, seed=0)
    optimizer.step()
    measured = handle.bytes_per_parameter()
    assert measured.total == pytest.approx(expected, abs=4 / 40_000 + 1e-9)  # torch's step counter: 4 bytes
    tensors = [parameters[0], parameters[0].grad, *optimizer.state[parameters[0]].values()]
    assert measured.total * 40_000 == sum(t.nbytes for t in tensors if t is not None)


def test_the_low_half_of_float32_weights_is_where_training_starts():
    weight = torch.randn(100)
    parameters, low_halves = bf16_twins([weight])
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    handle = compensate(optimizer, mode="split", low_halves=low_halves)
    assert torch.equal(next(iter(handle.float32_weights()))[1], weight)
    parameters[0].grad = torch.ones_like(parameters[0])
    optimizer.step()
    assert torch.equal(next(iter(handle.float32_weights()))[1], weight)


def test_an_optimizer_is_freed_with_its_last_reference():
    _, _, optimizer = adamw()
    compensate(optimizer)
    alive = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert alive() is None
    finally:
        gc.enable()


def test_a_subclass_that_calls_super_still_steps():
    class Loud(torch.optim.AdamW):
        steps = 0

        def step(self, closure=None):
            self.steps += 1
            return super().step(closure)

    parameters, _ = bf16_twins([torch.randn(4, 4)])
    optimizer = Loud(parameters, lr=1e-2)
    compensate(optimizer)
    set_gradients(parameters, seed=0)
    before = parameters[0].detach().clone()
    optimizer.step()
    assert optimizer.steps == 1
    assert not torch.equal(before, parameters[0].detach())


@pytest.mark.parametrize(("option", "value"), [("mode", "kahn"), ("states", "tiny")])
def test_unknown_options_are_refused_with_the_known_ones(option, value):
    _, _, optimizer = adamw()
    with pytest.raises(ValueError, match=rf"{option}='{value}' is unknown; choose one of '"):
        compensate(optimizer, **{option: value})


def test_compensating_twice_is_refused():
    _, _, optimizer = adamw()
    compensate(optimizer)
    with pytest.raises(ValueError, match=r"compensated already.*\.undo\(\)"):
        compensate(optimizer)


def test_a_differentiable_step_is_refused():
    _, _, optimizer = adamw(differentiable=True)
    with pytest.raises(ValueError, match="differentiable=True"):
        compensate(optimizer)


def test_nothing_to_compensate_is_said():
    optimizer = torch.optim.AdamW([Parameter(torch.randn(3))])
    with pytest.warns(NoEffectWarning, match=r"no bfloat16 parameter.*float32.*cast_module"):
        compensate(optimizer)

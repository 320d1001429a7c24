"""ScheduleFree optimizers switch between training and evaluation weights as they do on float32 weights."""

import copy

import pytest
import torch

from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.schedule_free import switch_in_float32
from tests.optim.helpers import all_tensors, assert_same_bits, bf16_twins

schedulefree = pytest.importorskip("schedulefree")
BF16 = torch.bfloat16
CLASSES = {
    "AdamW": lambda groups: schedulefree.AdamWScheduleFree(groups, lr=1e-2, weight_decay=0.1, foreach=False),
    "AdamW-foreach": lambda groups: schedulefree.AdamWScheduleFree(groups, lr=1e-2, warmup_steps=3),
    "SGD": lambda groups: schedulefree.SGDScheduleFree(groups, lr=1e-2, weight_decay=0.01),
    "RAdam": lambda groups: schedulefree.RAdamScheduleFree(groups, lr=1e-2),
}


def groups_of(parameters):
    return [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 5e-3}]


def pair(name: str, mode: str, states: str = "exact"):
    """An optimizer over float32 masters and a compensated one over their halves and one float32 weight."""
    torch.manual_seed(0)
    weights = [torch.randn(shape) for shape in ((20, 10), (10,), (6, 4), (5,))]
    masters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    parameters, low_halves = bf16_twins(weights[:3])
    parameters.append(torch.nn.Parameter(weights[3].clone()))
    oracle, optimizer = CLASSES[name](groups_of(masters)), CLASSES[name](groups_of(parameters))
    handle = compensate(optimizer, mode=mode, states=states, low_halves=low_halves)  # pyright: ignore
    switch_in_float32(optimizer)
    return (masters, oracle), (parameters, optimizer), handle


def step(seed: int, *sides) -> None:
    for parameters, optimizer in sides:
        generator = torch.Generator().manual_seed(seed)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(BF16).to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("name", CLASSES)
def test_split_follows_float32_bit_for_bit_through_every_switch(name):
    (masters, oracle), (parameters, optimizer), handle = pair(name, "split")
    for epoch in range(3):
        for switched in (oracle, optimizer):
            switched.train()
        for seed in range(3):
            step(3 * epoch + seed, (masters, oracle), (parameters, optimizer))
        for switch in ("eval", "eval", "train", "eval"):
            for switched in (oracle, optimizer):
                getattr(switched, switch)()
            for (_, weight), master in zip(handle.float32_weights(), masters, strict=True):
                assert torch.equal(weight, master), switch
    assert not optimizer.param_groups[1]["train_mode"]


@pytest.mark.parametrize(("mode", "limit"), [("kahan", 2**-14), ("none", 2**-5)])
def test_other_modes_stay_near(mode, limit):
    """Going back from the average divides its rounding by 1 - beta: without low halves 10 units of bfloat16."""
    (masters, oracle), (parameters, optimizer), handle = pair("AdamW", mode)
    for switched in (oracle, optimizer):
        switched.train()
    for seed in range(3):
        step(seed, (masters, oracle), (parameters, optimizer))
    for switched in (oracle, optimizer):
        switched.eval()
    for (_, weight), master in zip(handle.float32_weights(), masters, strict=True):
        assert ((weight - master).abs() <= limit * master.abs().clamp(min=0.05)).all()


@pytest.mark.parametrize("mode", ["kahan", "split", "split24"])
def test_switching_there_and_back_keeps_states(mode):
    _, (parameters, optimizer), _ = pair("AdamW", mode, "compact")
    optimizer.train()
    step(0, (parameters, optimizer))
    before = [copy.deepcopy(dict(optimizer.state[p])) for p in parameters]
    optimizer.eval()
    optimizer.train()
    for kept, parameter in zip(before, parameters, strict=True):
        assert kept.keys() == optimizer.state[parameter].keys()
        for name in ("z", "exp_avg_sq"):
            assert torch.equal(kept[name], optimizer.state[parameter][name])


def test_the_stock_switch_fails_on_bfloat16_weights():
    """The control: what the switch in float32 is for."""
    _, (parameters, optimizer), _ = pair("AdamW", "split")
    optimizer.train()
    step(0, (parameters, optimizer))
    before = all_tensors(optimizer)
    with pytest.raises(RuntimeError, match="dtype"):
        schedulefree.AdamWScheduleFree.eval(optimizer)
    assert_same_bits(before, all_tensors(optimizer))


def test_a_resume_continues_bit_for_bit_from_the_evaluation_weights():
    _, (parameters, optimizer), _ = pair("AdamW", "split", "compact")
    optimizer.train()
    step(0, (parameters, optimizer))
    optimizer.eval()  # as ScheduleFree asks for it before saving
    saved = copy.deepcopy(optimizer.state_dict())
    _, (others, resumed), _ = pair("AdamW", "split", "compact")
    for other, parameter in zip(others, parameters, strict=True):
        other.data.copy_(parameter.data)
    resumed.load_state_dict(saved)
    for weights, switched in ((parameters, optimizer), (others, resumed)):
        switched.train()
        step(1, (weights, switched))
    assert_same_bits(all_tensors(optimizer), all_tensors(resumed))


def test_other_optimizers_are_left_alone():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    switch_in_float32(optimizer)()
    assert type(optimizer) is torch.optim.SGD


def test_it_is_done_once_and_undone():
    optimizer = schedulefree.AdamWScheduleFree([torch.nn.Parameter(torch.ones(2))])
    undo = switch_in_float32(optimizer)
    kind = type(optimizer)
    switch_in_float32(optimizer)()
    assert type(optimizer) is kind
    assert isinstance(optimizer, schedulefree.AdamWScheduleFree)
    optimizer.train()
    assert optimizer.param_groups[0]["train_mode"]
    undo()
    assert type(optimizer) is schedulefree.AdamWScheduleFree

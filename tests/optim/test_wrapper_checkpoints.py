"""Optimizers around others resume bit for bit, however they lay out their state dicts."""

import io
from weakref import ref

import pytest
import torch
from torch.nn import Parameter

from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.consolidate import consolidate_state_dicts, float32_weight, parameter_names
from lightning_memkit.optim.own_attributes import inner_optimizers
from tests.optim.wrappers import WRAPPERS, Delegating, Lookahead, Nested, SlowInside

BASES = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Pair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.one = Parameter(torch.randn(6, 4, generator=generator).bfloat16())
        self.two = Parameter(torch.randn(5, generator=generator).bfloat16())


def made(wrapper, base="SGD", **options):
    module = Pair()
    optimizer = wrapper(BASES[base](module.parameters()))
    return module, optimizer, compensate(optimizer, **options)


def stepped(module, optimizer, steps) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
        optimizer.step()


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "split", "states": "exact"},
        {"mode": "split", "states": "compact"},
        {"mode": "kahan", "states": "exact"},
        {"mode": "stochastic", "states": "compact"},
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_resume_is_bitwise(wrapper, base, options):
    module, optimizer, whole = made(wrapper, base, **options)
    stepped(module, optimizer, range(3))
    saved = through_a_file((module.state_dict(), optimizer.state_dict()))
    stepped(module, optimizer, range(3, 7))
    other, resumed, again = made(wrapper, base, **options)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    stepped(other, resumed, range(3, 7))
    for (_, left), (_, right) in zip(whole.float32_weights(), again.float32_weights(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_checkpoint_without_low_halves_keeps_those_of_the_cast(wrapper):
    plain = Pair().float()
    before = wrapper(BASES["SGD"](plain.parameters()))
    stepped_in_float32 = through_a_file(before.state_dict())
    module = Pair()
    low = {p: torch.full(p.shape, 7, dtype=torch.int16) for p in module.parameters()}
    optimizer = wrapper(BASES["SGD"](module.parameters()))
    compensation = compensate(optimizer, mode="split", low_halves=low)
    expected = [wide for _, wide in compensation.float32_weights()]
    optimizer.load_state_dict(stepped_in_float32)
    for wide, (_, after) in zip(expected, compensation.float32_weights(), strict=True):
        assert torch.equal(wide, after)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_it_is_consolidated_to_the_weights_that_are_trained(wrapper):
    module, optimizer, compensation = made(wrapper, mode="split")
    stepped(module, optimizer, range(3))
    saved = through_a_file((module.state_dict(), optimizer.state_dict()))
    weights, (states,) = consolidate_state_dicts(saved[0], [saved[1]], parameter_names(module, [optimizer]))
    for (name, _), (_, wide) in zip(module.named_parameters(), compensation.float32_weights(), strict=True):
        assert torch.equal(weights[name], wide)
    assert "memkit" not in states
    fresh = Pair().float()
    wrapper(BASES["SGD"](fresh.parameters())).load_state_dict(states)
    with pytest.raises(ValueError, match="no names of the parameters"):
        consolidate_state_dicts(saved[0], [saved[1]], None)


def test_the_undo_gives_the_wrappers_own_methods_back_and_nothing_keeps_it_alive():
    module, optimizer, compensation = made(SlowInside)
    assert optimizer.state_dict.__func__ is not SlowInside.state_dict
    compensation.undo()
    assert "state_dict" not in vars(optimizer)
    assert "load_state_dict" not in vars(optimizer)
    assert "memkit" not in optimizer.state_dict()
    _, freed, compensation = made(SlowInside)
    watched = ref(freed)
    del freed
    assert watched() is None


def test_a_state_dict_that_is_no_dict_is_refused_with_the_remedy():
    class Listing(Nested):
        def state_dict(self):
            return [self.optimizer.state_dict()]

    _, optimizer, _ = made(Listing)
    with pytest.raises(TypeError, match="returns a list.*must be a dict"):
        optimizer.state_dict()


def test_optimizers_inside_are_found_once_at_any_depth():
    base = BASES["SGD"](Pair().parameters())
    outer = Lookahead(Delegating(base))
    assert inner_optimizers(outer) == [outer.optimizer, base]
    assert inner_optimizers(base) == []
    vars(outer)["all"] = {"of": [base, outer]}
    assert inner_optimizers(outer) == [outer.optimizer, base]


def test_low_halves_are_written_into_those_that_other_optimizers_share():
    module, optimizer, _ = made(SlowInside, mode="split")
    stepped(module, optimizer, range(2))
    shared = optimizer.state[module.one]["low_half"]
    saved, wide = (
        through_a_file(optimizer.state_dict()),
        float32_weight(module.one, optimizer.state[module.one]),
    )
    weight = module.one.detach().clone()
    stepped(module, optimizer, range(2, 4))
    module.one.data.copy_(weight)
    optimizer.load_state_dict(saved)
    assert optimizer.state[module.one]["low_half"] is shared
    assert torch.equal(float32_weight(module.one, {"low_half": shared}), wide)

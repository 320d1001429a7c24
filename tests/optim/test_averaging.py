"""Averages of compensated bfloat16 weights against torch's own averages of float32 masters."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from lightning_memkit.initialization.casting import cast_module
from lightning_memkit.optim.averaging import Loan, load_average, update_average, widen_average
from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.consolidate import float32_state_dict
from tests.optim.helpers import all_tensors, assert_same_bits

BF16 = torch.bfloat16
KINDS = {
    "swa": {},
    "ema": {"avg_fn": get_ema_avg_fn(0.999)},
    "ema-multi": {"multi_avg_fn": get_ema_multi_avg_fn(0.999)},
}


def pair(mode: str = "split"):
    """A float32 model, its bfloat16 twin, and an optimizer of each; one step of `step` keeps them alike."""
    torch.manual_seed(0)
    truth = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    model = copy.deepcopy(truth)
    low_halves: dict[nn.Parameter, torch.Tensor] = {}
    cast_module(model, BF16, low_halves=low_halves)
    oracle = torch.optim.AdamW(truth.parameters(), lr=1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compensate(optimizer, mode=mode, states="exact", low_halves=low_halves)  # pyright: ignore[reportArgumentType]
    return truth, oracle, model, optimizer


def step(seed: int, *sides) -> None:
    for net, optimizer in sides:
        generator = torch.Generator().manual_seed(seed)
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(BF16).to(parameter.dtype)
        optimizer.step()
        net.get_buffer("1.running_mean").add_(0.1 * seed)


@pytest.mark.parametrize("use_buffers", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_an_average_is_bitwise_that_of_float32_masters(kind, use_buffers):
    truth, oracle, model, optimizer = pair()
    expected = AveragedModel(truth, use_buffers=use_buffers, **KINDS[kind])
    averaged = AveragedModel(model, use_buffers=use_buffers, **KINDS[kind])
    widen_average(averaged)
    for seed in range(5):
        step(seed, (truth, oracle), (model, optimizer))
        expected.update_parameters(truth)
        update_average(averaged, model, optimizer)
    assert averaged.n_averaged == 5
    for name, value in expected.state_dict().items():
        assert torch.equal(averaged.state_dict()[name], value), name


def test_torchs_average_of_bfloat16_weights_stands_still():
    """The control: what the float32 average is for."""
    _, _, model, optimizer = pair()
    stock = AveragedModel(model, avg_fn=get_ema_avg_fn(0.999))
    ours = AveragedModel(model, avg_fn=get_ema_avg_fn(0.999))
    widen_average(ours)
    for seed in range(50):
        step(seed, (model, optimizer))
        stock.update_parameters(model)
        update_average(ours, model, optimizer)
        if seed == 0:
            first = copy.deepcopy(stock.module[0].weight)  # pyright: ignore[reportIndexIssue]
    moved = (stock.module[0].weight != first).float().mean()  # pyright: ignore
    ours_moved = (ours.module[0].weight != first).float().mean()  # pyright: ignore
    assert moved < 0.1
    assert ours_moved == 1.0


@pytest.mark.parametrize(("mode", "limit"), [("split", 0.0), ("kahan", 2**-16), ("none", 2**-8)])
def test_a_loaded_average_is_what_is_trained_next(mode, limit):
    _, _, model, optimizer = pair(mode)
    step(0, (model, optimizer))
    average = copy.deepcopy(model)
    widen_average(average)
    for value in [*average.parameters(), average.get_buffer("1.running_var")]:
        value.data.normal_()
    load_average(average, model, optimizer)
    weights = float32_state_dict(model, optimizer)
    for name, value in average.state_dict().items():
        assert ((weights[name] - value).abs() <= limit * value.abs()).all(), name
    assert torch.equal(model.get_buffer("1.running_var"), average.get_buffer("1.running_var"))
    average.get_buffer("1.running_var").zero_()
    load_average(average, model, optimizer, buffers=False)
    assert not torch.equal(model.get_buffer("1.running_var"), average.get_buffer("1.running_var"))


@pytest.mark.parametrize("mode", ["split", "kahan", "none"])
def test_a_loan_comes_back_bit_for_bit(mode):
    _, _, model, optimizer = pair(mode)
    step(0, (model, optimizer))
    average = copy.deepcopy(model)
    widen_average(average)
    for parameter in average.parameters():
        parameter.data.normal_()
    values = copy.deepcopy(average.state_dict())
    before, buffers = all_tensors(optimizer), copy.deepcopy(dict(model.named_buffers()))
    loan = Loan()
    loan.swap(average, model, optimizer)
    for name, lent in float32_state_dict(model, optimizer).items():
        expected = values[name] if name.startswith("1.") else values[name].to(BF16).float()
        assert torch.equal(lent, expected), name  # no low half of another weight joined in
    model.get_buffer("1.running_mean").fill_(7.0)
    loan.swap(average, model, optimizer)
    assert_same_bits(before, all_tensors(optimizer))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name])
    for name, value in average.state_dict().items():
        assert torch.equal(value, values[name]), name

"""Moments in 8 bits: exact in the mean, never zero under a first moment, one scale a block, whole rows."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memkit.optim.blocks import FIRST_ELEMENT
from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.consolidate import consolidate_state_dicts
from lightning_memkit.optim.quantised import (
    BLOCK,
    CODES,
    SCALES,
    blocks_of,
    codes_dtype,
    decode_,
    decoded_states,
    encode_,
    made_for,
    row_length,
)

FIRST, SECOND = "exp_avg", "exp_avg_sq"
LENGTHS = (32, 128, 300)


def noise(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << 16, (count,), generator=generator, dtype=torch.int32)


def room(name: str, values: Tensor) -> tuple[Tensor, Tensor]:
    rows, length = values.shape
    codes = torch.zeros(rows * length, dtype=codes_dtype(name))
    return codes, torch.zeros(rows, blocks_of(length), dtype=torch.bfloat16)


def back(name: str, codes: Tensor, scales: Tensor) -> Tensor:
    wide = torch.empty(len(codes))
    decode_(name, codes, scales, wide)
    return wide.view(len(scales), -1)


def moments(name: str, rows: int, length: int, seed: int = 1) -> Tensor:
    """Of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, length, generator=generator) * torch.logspace(-3, 0, length)
    return values if name == FIRST else values.square()


@pytest.mark.parametrize("length", LENGTHS)
def test_first_moments_are_exact_in_the_mean(length: int) -> None:
    values = moments(FIRST, 3, length)
    total = torch.zeros(3, length, dtype=torch.float64)
    for seed in range(1000):
        codes, scales = room(FIRST, values)
        encode_(FIRST, values.flatten(), codes, scales, noise(3 * length, seed))
        total += back(FIRST, codes, scales)
    steps = scales.double().repeat_interleave(BLOCK, 1)[:, :length] / 127
    # A rounding is off by less than the distance of two codes: 2 / 127 of the scale at the most.
    assert ((total / 1000 - values).abs() < 5 * 2 * steps / math.sqrt(1000)).all()


@pytest.mark.parametrize("name", [FIRST, SECOND])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_largest_error_is_the_distance_of_two_codes(name: str, length: int) -> None:
    values = moments(name, 5, length)
    codes, scales = room(name, values)
    encode_(name, values.flatten(), codes, scales, noise(5 * length))
    power, levels = (2, 127) if name == FIRST else (8, 255)
    wide, scale = values.abs().double(), scales.double().repeat_interleave(BLOCK, 1)[:, :length]
    at = (wide / scale) ** (1 / power) * levels
    below, above = ((at + by).floor() / levels for by in (-1e-4, 1 + 1e-4))
    found = back(name, codes, scales).double().abs()
    assert (found >= scale * below**power * (1 - 1e-5)).all()
    assert (found <= scale * above.clamp(max=1) ** power * (1 + 1e-5)).all()
    assert torch.equal(back(name, codes, scales).sign(), values.sign() * (found > 0))


def test_an_update_is_right_in_the_mean_whatever_rounding_does_to_its_divisor() -> None:
    """1 / sqrt(v) of a running mean in its steady state, over 4,096 values; the code rounded to nearest freezes it."""
    generator = torch.Generator().manual_seed(2)
    beta, rows, length = 0.99, 32, 128
    exact = torch.ones(rows, length)
    codes, scales = room(SECOND, exact)
    encode_(SECOND, exact.flatten(), codes, scales, noise(rows * length))
    ours, theirs = 0.0, 0.0
    for step in range(600):
        squares = torch.randn(rows, length, generator=generator).square()
        exact = beta * exact + (1 - beta) * squares
        rounded = beta * back(SECOND, codes, scales) + (1 - beta) * squares
        if step >= 200:
            ours += rounded.rsqrt().mean().item()
            theirs += exact.rsqrt().mean().item()
        encode_(SECOND, rounded.flatten(), codes, scales, noise(rows * length, step + 1))
    assert ours / theirs == pytest.approx(1, abs=0.005)


def test_a_second_moment_becomes_zero_only_if_it_is() -> None:
    values = torch.full((1, 128), 1e-30)
    values[0, 0], values[0, 1] = 1.0, 0.0
    codes, scales = room(SECOND, values)
    for seed in range(20):
        encode_(SECOND, values.flatten(), codes, scales, noise(128, seed))
        found = back(SECOND, codes, scales)[0]
        assert found[1] == 0
        assert (found[2:] > 0).all()


@pytest.mark.parametrize("name", [FIRST, SECOND])
def test_rows_and_blocks_know_nothing_of_each_other(name: str) -> None:
    """A rare row beside one that is a million times as large has the codes that it has alone."""
    values = moments(name, 3, 300)
    values[0] *= 1e6
    values[2, :128] = torch.inf if name == SECOND else torch.nan
    drawn = noise(900)
    codes, scales = room(name, values)
    encode_(name, values.flatten(), codes, scales, drawn)
    alone, of_it = room(name, values[1:2])
    encode_(name, values[1], alone, of_it, drawn[300:600])
    assert torch.equal(codes[300:600], alone)
    assert torch.equal(scales[1:2], of_it)
    broken = back(name, codes, scales)
    assert broken[2, :128].isnan().all()
    assert broken[2, 128:].isfinite().all()
    assert broken[:2].isfinite().all()


@pytest.mark.parametrize("name", [FIRST, SECOND])
def test_what_only_decays_keeps_its_scale_and_its_share(name: str) -> None:
    values = moments(name, 2, 128)
    codes, scales = room(name, values)
    encode_(name, values.flatten(), codes, scales, noise(256))
    stored = back(name, codes, scales)
    before, of_it = codes.clone(), scales.clone()
    encode_(name, stored.flatten(), codes, scales, noise(256, 1))
    # One in 65,536 draws moves a code by one: the root of its power is a rounding away from it.
    assert (codes.int() - before.int()).count_nonzero() <= 2
    assert torch.equal(scales, of_it)
    encode_(name, (stored * 0.95).flatten(), codes, scales, noise(256, 2))
    assert torch.equal(scales, of_it)
    encode_(name, (stored * 0.5).flatten(), codes, scales, noise(256, 3))
    assert (scales < of_it).all()


def test_the_smallest_and_the_largest_values() -> None:
    values = torch.tensor([[1e-45, 1e-38], [3.4e38, 1.0]]).repeat_interleave(64, 1)
    codes, scales = room(SECOND, values)
    encode_(SECOND, values.flatten(), codes, scales, noise(256))
    found = back(SECOND, codes, scales)
    assert found.isfinite().all()
    assert (found[0, 64:] / 1e-38 - 1).abs().max() < 0.2
    assert (found[1, :64] / 3.4e38 - 1).abs().max() < 0.01
    zero, of_it = room(SECOND, values)
    encode_(SECOND, torch.zeros(256), zero, of_it, noise(256))
    assert not back(SECOND, zero, of_it).any()


@pytest.mark.parametrize("name", [FIRST, SECOND])
def test_a_shard_without_rows(name: str) -> None:
    codes, scales = room(name, torch.empty(0, 64))
    encode_(name, torch.empty(0), codes, scales, noise(0))
    wide = torch.empty(0)
    decode_(name, codes, scales, wide)
    assert (codes.numel(), wide.numel(), scales.shape) == (0, 0, (0, 1))


@pytest.mark.parametrize(
    ("optimizer", "options", "kept"),
    [
        (torch.optim.RMSprop, {"centered": True}, {"square_avg", "grad_avg"}),
        (torch.optim.AdamW, {"amsgrad": True}, {SECOND, "max_exp_avg_sq", FIRST + CODES}),
    ],
)
def test_second_moments_with_a_companion_keep_16_bits(optimizer: type, options: dict, kept: set) -> None:
    """A difference from a mean's square may not become negative, and a maximum would follow the noise."""
    net, stepping, _ = trained(optimizer, "split", "8-bit", **options)
    state = stepping.state[net[0].weight]
    assert kept <= state.keys()
    assert SECOND + CODES not in state
    assert "square_avg" + CODES not in state


def test_which_parameters_have_8_bits() -> None:
    assert row_length(torch.empty(4, 32)) == 32
    assert row_length(torch.empty(4, 8, 3, 3)) == 72
    assert row_length(torch.empty(4, 8, 3, 3).to(memory_format=torch.channels_last)) == 72
    assert row_length(torch.empty(1000)) is None
    assert row_length(torch.empty(4, 31)) is None
    assert row_length(torch.empty(64, 64).t()[:32]) is None
    assert row_length(torch.empty(64, 128)[:, :64]) is None


def trained(optimizer: type, mode: str, states: str, steps: int = 8, **options: object) -> tuple:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 10)).bfloat16()
    stepping = optimizer(net.parameters(), lr=1e-3, **options)
    handle = compensate(stepping, mode=mode, states=states)  # pyright: ignore[reportArgumentType]
    go_on(net, stepping, steps)
    return net, stepping, handle


def go_on(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        net(torch.randn(16, 64, generator=generator).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_bytes_a_parameter() -> None:
    """Weight 3, moments 1 + 1 and a scale of 2 bytes for 128 values each, gradient 2."""
    weight = nn.Parameter(torch.randn(256, 1024).bfloat16())
    optimizer = torch.optim.AdamW([weight])
    handle = compensate(optimizer, mode="split24", states="8-bit")
    weight.grad = torch.randn(256, 1024).bfloat16()
    optimizer.step()
    found = handle.bytes_per_parameter()
    assert (found.weights, found.gradients, found.compensation) == (2, 2, 1)
    assert found.states == pytest.approx(2 + 2 * 2 / 128, abs=1e-4)
    weight.grad = None
    assert handle.bytes_per_parameter().total == pytest.approx(5.03, abs=0.01)


class Own(torch.optim.AdamW):
    """Unknown to every list of classes: it is stepped under its parameters' identity."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.NAdam, {}),
        (torch.optim.RMSprop, {"momentum": 0.9}),
        (Own, {}),
    ],
)
def test_each_optimizer_steps_as_with_exact_states(optimizer: type, options: dict) -> None:
    _, ours, handle = trained(optimizer, "split", "8-bit", steps=60, **options)
    _, exact, theirs = trained(optimizer, "split", "exact", steps=60, **options)
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 10)).bfloat16()
    pairs = zip(handle.float32_weights(), theirs.float32_weights(), start.parameters(), strict=True)
    for (weight, mine), (_, other), begun in pairs:
        assert any(name.endswith(CODES) for name in ours.state[weight]) == (weight.dim() > 1)
        moved = (other - begun.float()).norm()
        assert (mine - other).norm() < 0.1 * moved
    assert not any(name.endswith(CODES) for state in exact.state.values() for name in state)


def test_states_change_their_form_with_the_option() -> None:
    """A run in 8 bits goes on in bfloat16 or float32, and the other way round, with the moments that it had."""
    for first, then in (("8-bit", "compact"), ("8-bit", "exact"), ("compact", "8-bit"), ("exact", "8-bit")):
        net, optimizer, _ = trained(torch.optim.AdamW, "split", first)
        saved = copy.deepcopy(optimizer.state_dict())
        other = copy.deepcopy(net)
        resumed = torch.optim.AdamW(other.parameters(), lr=1e-3)
        states: Any = then
        compensate(resumed, mode="split", states=states)
        resumed.load_state_dict(saved)
        go_on(other, resumed, 1)
        state = resumed.state[other[0].weight]
        assert {name for name in state if name not in ("step", "low_half")} == (
            {FIRST + CODES, FIRST + SCALES, SECOND + CODES, SECOND + SCALES}
            if then == "8-bit"
            else {FIRST, SECOND}
        )
        go_on(net, optimizer, 1)
        ours, theirs = decoded_states(state), decoded_states(optimizer.state[net[0].weight])
        for name in (FIRST, SECOND):
            mine, other_one = ours[name].float(), theirs[name].float()
            assert (mine - other_one).norm() < 0.05 * other_one.norm()


def test_a_checkpoint_in_8_bits_becomes_float32() -> None:
    net, optimizer, _ = trained(torch.optim.AdamW, "split24", "8-bit")
    names = [[[name] for name, _ in net.named_parameters()]]
    weights, (plain,) = consolidate_state_dicts(net.state_dict(), [optimizer.state_dict()], names)
    state, expected = plain["state"][0], decoded_states(optimizer.state[net[0].weight])
    assert set(state) == {"step", FIRST, SECOND}
    assert torch.equal(state[FIRST], expected[FIRST])
    assert torch.equal(state[SECOND], expected[SECOND])
    wide = nn.Sequential(nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 10))
    wide.load_state_dict(weights)
    float32 = torch.optim.AdamW(wide.parameters())
    float32.load_state_dict(plain)
    wide(torch.randn(4, 64)).square().mean().backward()
    float32.step()


def test_the_undo_leaves_plain_states() -> None:
    net, optimizer, handle = trained(torch.optim.AdamW, "split24", "8-bit")
    before = decoded_states(optimizer.state[net[0].weight])
    handle.undo()
    state = optimizer.state[net[0].weight]
    assert set(state) == {"step", FIRST, SECOND}
    assert torch.equal(state[FIRST], before[FIRST].bfloat16())


def test_made_states_have_the_layout_of_their_parameter() -> None:
    parameter = torch.empty(4, 8, 3, 3, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    made = made_for(parameter, SECOND, 72)
    assert made[SECOND + CODES].stride() == parameter.stride()
    assert made[SECOND + SCALES].shape == (4, 1)


def test_shards_by_rows_take_the_whole_parameters_step() -> None:
    """The noise of an element is that of its place in the whole, and blocks end with rows."""
    torch.manual_seed(3)
    weight, gradient = torch.randn(9, 300).bfloat16(), torch.randn(9, 300).bfloat16()

    def stepped(rows: slice) -> list[Tensor]:
        shard = nn.Parameter(weight[rows].clone())
        setattr(shard, FIRST_ELEMENT, (rows.start or 0) * 300)
        shard.grad = gradient[rows].clone()
        optimizer = torch.optim.AdamW([shard], lr=1e-3)
        compensate(optimizer, mode="split24", states="8-bit")
        for _ in range(3):
            optimizer.step()
        state = optimizer.state[shard]
        return [shard.detach(), *(state[name] for name in sorted(state) if name != "step")]

    whole, parts = stepped(slice(None)), [stepped(slice(0, 4)), stepped(slice(4, 9))]
    for one, first, second in zip(whole, *parts, strict=True):
        assert torch.equal(one, torch.cat([first, second]))


@pytest.mark.long
def test_rare_rows_of_an_embedding_grow_as_under_float32() -> None:
    """One row in forty has a gradient in a step; norms after 2,000 steps, within half a percent."""
    torch.manual_seed(4)
    table = torch.randn(64, 128)
    directions = torch.randn(64, 128)
    wide = nn.Parameter(table.clone().bfloat16().float())
    narrow = nn.Parameter(table.clone().bfloat16())
    pair = [(one, torch.optim.AdamW([one], lr=1e-3, weight_decay=0.0)) for one in (wide, narrow)]
    handle = compensate(pair[1][1], mode="split24", states="8-bit")
    for _ in range(2000):
        rare = (torch.rand(64, 1) < 1 / 40).float()
        gradient = rare * (0.3 * directions + torch.randn(64, 128))
        for parameter, optimizer in pair:
            parameter.grad = gradient.to(parameter.dtype)
            optimizer.step()
    (_, found), *_ = handle.float32_weights()
    moved = (wide.detach() - table).norm() / table.norm()
    assert moved > 0.05
    ratio = found.norm(dim=1) / wide.detach().norm(dim=1)
    assert ratio.mean().item() == pytest.approx(1, abs=0.001)
    assert (ratio - 1).abs().max() < 0.005

"""24 bits of a weight: what is kept, what is rounded at random, and that small updates add up."""

import pytest
import torch

from lightning_memkit.optim import native
from lightning_memkit.optim.compensation import compensate
from lightning_memkit.optim.modes import low_state_of_tensor
from lightning_memkit.optim.split24 import LOW_BYTE, join24_, split24_
from lightning_memkit.optim.stochastic_rounding import TILE, StochasticRounding


def stored(values: torch.Tensor, rounding: StochasticRounding | None = None, start: int = 0) -> torch.Tensor:
    """The values that come back, from tensors of any strides."""
    high, low = torch.empty_like(values, dtype=torch.bfloat16), torch.empty_like(values, dtype=torch.int8)
    split24_(values, high, low, rounding, (0, start))
    back = torch.empty_like(values)
    join24_(high, low, back)
    return back


def stepping(seed: int = 0) -> StochasticRounding:
    rounding = StochasticRounding(seed)
    rounding.begin_step()
    return rounding


def test_values_of_24_bits_are_kept_exactly():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2 * TILE + 3,), generator=generator).int() & ~0xFF
    bits[:4] = torch.tensor([0, -(2**31), 0x7F800000, -0x800000]).int()
    values = bits.view(torch.float32)
    known = ~values.isnan()
    for rounding in (None, stepping()):
        back = stored(values, rounding)
        assert torch.equal(back.view(torch.int32)[known], bits[known])
        assert back[~known].isnan().all()


def test_the_weight_is_the_nearest_bfloat16():
    values = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    high, low = torch.empty(5000, dtype=torch.bfloat16), torch.empty(5000, dtype=torch.int8)
    split24_(values, high, low)
    assert float((high.double() - values.double()).abs().div(values.abs()).max()) <= 2**-8 + 2**-16


def test_the_mean_is_the_value_itself():
    """The value lies three eighths of the way from one number of 24 bits to the next."""
    between = (
        torch.tensor([0x3F800100 + 0x60, -0x407FFF00 + 0x60], dtype=torch.int64).int().view(torch.float32)
    )
    values = between.repeat_interleave(100_000)
    back = stored(values, stepping()).double().view(2, -1)
    assert len(back.unique()) == 4
    step = 2.0**-15
    assert ((back.mean(1) - between.double()).abs() < 0.01 * step).all()


def test_noise_is_the_elements_own_wherever_a_shard_begins():
    values = torch.randn(3 * TILE, generator=torch.Generator().manual_seed(2))
    whole, cut = stored(values, stepping()), TILE + 321
    assert torch.equal(stored(values[cut:], stepping(), start=cut), whole[cut:])
    assert not torch.equal(stored(values, stepping(1)), whole)


def test_tensors_of_other_strides():
    values = torch.randn(60, 40, generator=torch.Generator().manual_seed(3))
    high = torch.empty(40, 60, dtype=torch.bfloat16).t()
    low, back = torch.empty(60, 80, dtype=torch.int8)[:, ::2], torch.empty(60, 40)
    split24_(values, high, low, stepping())
    join24_(high, low, back)
    assert torch.equal(back, stored(values, stepping()))


@pytest.mark.parametrize("low", [-128, -1, 0, 5, 127])
def test_a_weight_set_to_zero_from_outside_has_no_use_for_its_old_byte(low):
    high = torch.tensor([0.0, -0.0, 1.0, -1e-40], dtype=torch.bfloat16)
    out = torch.empty(4)
    join24_(high, torch.full((4,), low, dtype=torch.int8), out)
    assert out.isfinite().all()
    assert (out - high.float()).abs().max() <= 2**-8


def test_memory_of_9_bytes_a_parameter():
    weight = torch.nn.Parameter(torch.randn(64, 64).bfloat16())
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    handle = compensate(optimizer, mode="split24")
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert optimizer.state[weight][LOW_BYTE].dtype == torch.int8
    assert low_state_of_tensor(optimizer.state[weight][LOW_BYTE]) == LOW_BYTE
    measured = handle.bytes_per_parameter()
    assert (measured.weights, measured.gradients, measured.compensation) == (2, 2, 1)
    assert measured.states == pytest.approx(4, abs=0.01)


@pytest.mark.parametrize("available", [True, False], ids=["kernel", "plain torch"])
@pytest.mark.parametrize("update", [1e-5, 1e-6])
def test_updates_far_below_the_last_bit_add_up(update, available, monkeypatch):
    """Rounded to nearest, 2,000 updates of 1e-6 to weights of 1 would change nothing: half of a last bit is 1.5e-5."""
    if available and native.why_unavailable() is not None:
        pytest.skip(f"no kernel: {native.why_unavailable()}")
    monkeypatch.setattr(native, "available", lambda: available)
    weights = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weights], lr=update)
    handle = compensate(optimizer, mode="split24")
    weights.grad = -torch.ones_like(weights)
    for _ in range(2000):
        optimizer.step()
    moved = next(wide for _, wide in handle.float32_weights()).double().mean() - 1
    # The standard deviation of one weight is sqrt(2000 * update / bit) bits, and the mean's 1 / 64 of that.
    bit = 2.0**-15
    in_float32 = float(torch.tensor(1 + update) - 1)
    expected, deviation = 2000 * in_float32, bit * (2000 * update / bit) ** 0.5 / 64
    assert abs(float(moved) - expected) < 5 * deviation
    assert expected > 20 * deviation


def test_a_float32_master_becomes_24_bits_where_it_is_compensated():
    """Low halves that a cast has captured hold 8 bits more: the nearest 24 bits are kept, and the weight."""
    weight = torch.nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
    low_half = torch.full((100,), 0x1234, dtype=torch.int16)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    handle = compensate(optimizer, mode="split24", low_halves={weight: low_half})
    rounded = next(wide for _, wide in handle.float32_weights()).view(torch.int32)
    assert rounded.unique().tolist() == [0x3F801200]
    assert torch.equal(weight, torch.ones(100, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert set(optimizer.state[weight]) & {"low_half", "compensation", LOW_BYTE} == {LOW_BYTE}
    kept = next(wide for _, wide in handle.float32_weights()).view(torch.int32)
    assert torch.equal(kept, rounded)  # a step of nothing rounds nothing again

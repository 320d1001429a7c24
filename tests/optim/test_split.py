import pytest
import torch

from lightning_memkit.optim.split import join, split


def floats(*patterns: int) -> torch.Tensor:
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


def test_every_random_pattern_joins_back_bit_for_bit():
    bits = torch.randint(-(2**31), 2**31, (1 << 22,), dtype=torch.int64).to(torch.int32)
    weights = bits.view(torch.float32)
    joined = join(*split(weights))
    number = ~weights.isnan()
    assert torch.equal(joined.view(torch.int32)[number], bits[number])
    assert joined[~number].isnan().all()


def test_the_high_half_is_the_nearest_bfloat16():
    weights = torch.randn(1 << 20)
    high, _ = split(weights)
    nearest = weights.to(torch.bfloat16)  # torch's own rounding; they differ on ties alone
    distance, least = (high.double() - weights).abs(), (nearest.double() - weights).abs()
    assert torch.equal(distance, least)


@pytest.mark.parametrize("pattern", [0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0xFFC00000, 0x7FFF8000])
def test_no_payload_of_a_nan_becomes_a_number(pattern):
    high, low = split(floats(pattern))
    assert high.isnan().all()
    assert low.item() == 0
    assert join(high, low).isnan().all()


def test_special_values_survive():
    weights = floats(0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x00000001, 0x80000001)
    assert torch.equal(join(*split(weights)).view(torch.int32), weights.view(torch.int32))


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_weight_set_to_zero_from_outside_stays_finite(zero):
    high, low = split(torch.tensor([1.0 - 2**-12, 1.0 + 2**-12]))
    assert (low < 0).any()
    high.fill_(zero)
    joined = join(high, low)
    assert joined.isfinite().all()
    assert joined.abs().max() < 1e-38


def test_a_weight_scaled_from_outside_is_off_by_less_than_half_a_percent():
    weights = torch.randn(10_000)
    high, low = split(weights)
    scaled = join(high * 0.5, low)
    assert ((scaled - 0.5 * weights).abs() <= 0.004 * (0.5 * weights).abs()).all()


def test_strided_weights_join_back():
    weights = torch.randn(300, 500).t()
    halves = split(weights)
    assert halves[0].stride() == weights.stride()
    assert torch.equal(join(*halves), weights)
    assert torch.equal(join(halves[0].contiguous(), halves[1]), weights)  # unlike strides

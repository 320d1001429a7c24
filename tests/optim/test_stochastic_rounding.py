import pytest
import torch

from lightning_memkit.optim.stochastic_rounding import TILE, StochasticRounding


def rounded(source: torch.Tensor, *, seed: int = 0, step: int = 1, stream=(0, "weight", 0)) -> torch.Tensor:
    rounding = StochasticRounding(seed)
    rounding.load_state_dict({"seed": seed, "step": step})
    out = torch.empty_like(source, dtype=torch.bfloat16)
    rounding.round_(source, out, stream)
    return out


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_mean_is_the_value(sign):
    value = sign * (1.0 + 0.3 * 2**-7)
    low, high = sorted((sign * 1.0, sign * (1.0 + 2**-7)))
    out = rounded(torch.full((1 << 20,), value)).double()
    assert set(out.unique().tolist()) == {low, high}
    deviation = 2**-7 * (0.3 * 0.7 / (1 << 20)) ** 0.5
    # Two elements' noise is independent, so the usual error of a mean holds.
    assert abs(out.mean().item() - value) < 5 * deviation


def test_every_element_is_right_on_average_over_steps():
    value = 1.0 + 0.3 * 2**-7
    source = torch.full((2 * TILE,), value)
    steps = 400
    mean = torch.stack([rounded(source, step=step) for step in range(1, steps + 1)]).double().mean(0)
    deviation = 2**-7 * (0.3 * 0.7 / steps) ** 0.5
    assert (mean - value).abs().max() < 6 * deviation


def test_runs_of_a_tile_share_no_noise():
    out = rounded(torch.full((2 * TILE,), 1.0 + 0.5 * 2**-7)) > 1.0
    same = (out[:TILE] == out[TILE:]).double().mean().item()
    assert abs(same - 0.5) < 0.02


def test_seed_step_and_stream_each_change_the_noise():
    source = torch.full((4096,), 1.0 + 0.5 * 2**-7)
    first = rounded(source)
    assert torch.equal(first, rounded(source))
    assert not torch.equal(first, rounded(source, seed=1))
    assert not torch.equal(first, rounded(source, step=2))
    assert not torch.equal(first, rounded(source, stream=(1, "weight", 0)))
    assert not torch.equal(first, rounded(source, stream=(0, "exp_avg_sq", 0)))


def test_torchs_random_state_is_neither_read_nor_moved():
    source = torch.randn(5000)
    before = torch.get_rng_state()
    first = rounded(source)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(first, rounded(source))


@pytest.mark.parametrize("pattern", [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0xFFC00000])
def test_nan_stays_nan(pattern):
    source = torch.full((1000,), pattern, dtype=torch.int64).to(torch.int32).view(torch.float32)
    assert rounded(source).isnan().all()


def test_exact_values_infinity_and_zero_stay():
    source = torch.tensor([1.0, -2.5, 0.0, -0.0, torch.inf, -torch.inf])
    assert torch.equal(rounded(source).float(), source)


def test_strided_tensors_are_rounded_like_dense_ones():
    source = torch.randn(300, 400)
    out = torch.empty(400, 300, dtype=torch.bfloat16).t()
    rounding = StochasticRounding()
    rounding.begin_step()
    rounding.round_(source, out, (0, "weight", 0))
    assert torch.equal(out, rounded(source))
